"""The flags that `memo plan` and `memo estimate` share: a job's model, machine, and trained parameters."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

from memo.config import ModelConfig, TrainingConfig
from memo.config.flag import COUNT, TOKENS, Flag
from memo.config.model import Quantization
from memo.config.run import HardwareConfig, KernelSet
from memo.config.training import MomentDtype
from memo.estimate.cases import DEFAULT_SEQ_LEN


@dataclass(frozen=True, kw_only=True)
class Job:
    model: str | None = None
    """A preset (upper or lower case), or the path of a Hugging Face config.json, even of a family that memo can only
    plan for."""
    seq_len: Annotated[int, TOKENS, Flag(aliases=("seq_length",))] = DEFAULT_SEQ_LEN
    """Tokens of one sequence."""
    gpus: int | None = None
    """All GPUs."""
    global_batch_size: Annotated[int | None, COUNT, Flag(aliases=("gbs",))] = None
    """Sequences in one step."""
    hardware: Annotated[str, Flag(aliases=("gpu",))] = ""
    """Machine by name, such as a100-40 or h100-80, or a TOML file of one; default: a800-80."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU, as nvidia-smi reports it; default: the hardware's."""
    host_memory_gib: float | None = None
    """Host memory of each node that the run gets; default: the share of its GPUs in the hardware's."""
    nvme_gib: float | None = None
    """Local disks of one node, for activations that do not fit into its memory (--offload-nvme-path); default: the
    hardware's, which has none unless its file names them."""
    nvme_gb_per_s: float | None = None
    """Rate of these disks in each direction, for all ranks together, 10^9 bytes per second; default: the hardware's,
    else 2."""
    exp_avg_dtype: MomentDtype = TrainingConfig.exp_avg_dtype
    """Setting of the run: bf16 keeps AdamW's first moments in 2 bytes for each parameter instead of 4."""
    exp_avg_sq_dtype: MomentDtype = TrainingConfig.exp_avg_sq_dtype
    """Setting of the run: bf16 keeps AdamW's second moments in 2 bytes for each parameter instead of 4."""
    deterministic: bool = False
    """Setting of the run: every run gives the same bits, with attention kernels that are slower on newer GPUs."""
    kernels: KernelSet = HardwareConfig.kernels
    """Setting of the run: norms, RoPE, activations and loss by PyTorch's kernels, or by fused ones in Triton."""
    lora_rank: int = ModelConfig.lora_rank
    """Setting of the run: rank of LoRA adapters beside a frozen model; 0: the whole model is trained."""
    lora_target_modules: str = ModelConfig.lora_target_modules
    """Setting of the run: the matrices that have LoRA adapters."""
    quantize: Quantization = ModelConfig.quantize
    """Setting of the run: format of the frozen matrices of layers, nf4 or int8 (QLoRA)."""
    freeze: str = ""
    """Setting of the run: patterns of parameters that are not trained, such as layers.[0-7].*."""
    train_only: str = ""
    """Setting of the run: patterns of the only parameters that are trained."""

    def job(self) -> dict[str, Any]:
        """{field: value} of the flags of this class."""
        return {field.name: getattr(self, field.name) for field in fields(Job)}
