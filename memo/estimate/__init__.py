"""First estimates from the configuration alone: parameters, FLOPs, memory, step time, admission.

Pure functions of a RunConfig that `memo.config.checks.check` has accepted and whose vocab_size is resolved;
nothing here imports torch.
"""

from memo.estimate.admission import Admission, admit
from memo.estimate.flops import matmul_parameters, model_flops_per_token, step_flops
from memo.estimate.host_memory import available_host_bytes
from memo.estimate.memory import MemoryEstimate, estimate_memory
from memo.estimate.parameters import ParameterCount, count_parameters, paper_parameters, stage_parameters
from memo.estimate.time import estimate_step_s

__all__ = [
    "Admission",
    "MemoryEstimate",
    "ParameterCount",
    "admit",
    "available_host_bytes",
    "count_parameters",
    "estimate_memory",
    "estimate_step_s",
    "matmul_parameters",
    "model_flops_per_token",
    "paper_parameters",
    "stage_parameters",
    "step_flops",
]
