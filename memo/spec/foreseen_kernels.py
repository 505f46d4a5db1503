"""What plans and estimates assume of kernels that a run chooses where its GPU and packages are."""

from memo.config.attention_kernels import LARGEST_FUSED_HEAD_DIM
from memo.config.layer_words import LINEAR
from memo.config.model import ModelConfig
from memo.config.run import HardwareConfig


def foreseen_kernels(model: ModelConfig, hardware: HardwareConfig | None = None) -> str | None:
    """Return a text about kernels with which memory and time are foreseen, although a run may take faster ones, and
    about slow ones that a run takes as well.

    None if the model has no layers of this kind, or if the user chose the kernels in `hardware`."""
    hardware, told = hardware or HardwareConfig(), []
    if hardware.delta_backend == "auto" and LINEAR in model.types_of_layers:
        told.append(
            "gated delta nets: torch's operations are foreseen; under --delta-backend auto a run takes those of "
            "flash-linear-attention where they can run, which need less memory and time"
        )
    if hardware.attention_backend == "auto" and model.attn_logit_softcapping:
        told.append(
            "capped scores: torch's operations are foreseen; under --attention-backend auto a run takes those of "
            "flash-attn where it is installed, which take much less time"
        )
    if (size := model.of_full_layers.head_dim) > LARGEST_FUSED_HEAD_DIM:
        told.append(
            f"heads of {size} channels: torch's operations are foreseen, and a run takes them, because no fused kernel "
            f"takes heads of more than {LARGEST_FUSED_HEAD_DIM}; attention of these layers takes many times as long"
        )
    return "\n".join(told) or None
