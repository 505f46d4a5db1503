"""First estimates from the configuration alone: memory, step time, admission.

Pure functions of a RunConfig that `memo.config.checks.check` has accepted and whose vocab_size is resolved;
nothing here imports torch.
"""

from memo.estimate.admission import Admission, admit
from memo.estimate.host_memory import available_host_bytes
from memo.estimate.own_memory import own_memory
from memo.estimate.rank_memory import RankMemory
from memo.estimate.time import estimate_step_s

__all__ = [
    "Admission",
    "RankMemory",
    "admit",
    "available_host_bytes",
    "estimate_step_s",
    "own_memory",
]
