"""The job that `memo plan` and `memo estimate` are asked about: its model, its machine, and what of it is trained."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

from memo.config import ModelConfig, TrainingConfig
from memo.config.flag import COUNT, TOKENS, Flag
from memo.config.model import Quantization
from memo.config.training import MomentDtype
from memo.estimate.cases import DEFAULT_SEQ_LEN


@dataclass(frozen=True, kw_only=True)
class Job:
    model: str | None = None
    """A preset, in letters of any case, or the path of a config.json of Hugging Face, also of families that memo can
    only plan for."""
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
    """Host memory that the run gets of each node; default: of the hardware's the part of its GPUs."""
    nvme_gib: float | None = None
    """Local disks of one node, for activations that its memory does not hold (--offload-nvme-path); default: the
    hardware's, which has none unless its file names them."""
    nvme_gb_per_s: float | None = None
    """Their rate in either direction, of all ranks together, 10^9 bytes a second; default: the hardware's, else 2."""
    exp_avg_dtype: MomentDtype = TrainingConfig.exp_avg_dtype
    """As of the run: bf16 keeps the first moments of AdamW in 2 bytes a parameter instead of 4."""
    exp_avg_sq_dtype: MomentDtype = TrainingConfig.exp_avg_sq_dtype
    """The same of the second moments."""
    deterministic: bool = False
    """As of the run: every run gives the same bits, under kernels of attention that are slower on newer GPUs."""
    lora_rank: int = ModelConfig.lora_rank
    """As of the run: rank of LoRA's adapters beside a frozen model; 0: all of it is trained."""
    lora_target_modules: str = ModelConfig.lora_target_modules
    """As of the run: the matrices that have them."""
    quantize: Quantization = ModelConfig.quantize
    """As of the run: what the frozen matrices of layers are kept in, nf4 or int8 (QLoRA)."""
    freeze: str = ""
    """As of the run: patterns of parameters that are not trained, such as layers.[0-7].*."""
    train_only: str = ""
    """As of the run: the same of those that are trained."""

    def job(self) -> dict[str, Any]:
        """{field: value} of these flags alone."""
        return {field.name: getattr(self, field.name) for field in fields(Job)}
