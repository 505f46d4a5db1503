"""`memo.plan` for callers in Python: answers names of other trainers, and accepts lengths such as "128K"."""

import difflib
import functools
import inspect
from typing import TYPE_CHECKING, Any

from memo.cli.job import Job
from memo.config.flag_table import entries_of
from memo.config.other_names import advice
from memo.errors import ConfigError
from memo.search import planning

if TYPE_CHECKING:
    from memo.search import Plan

_KEYWORDS = tuple(inspect.signature(planning.plan).parameters)
_LAYOUT = "memo.plan chooses it, and `plan.best.layout` says which; `memo estimate` asks about one layout"
_AXES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
_NOTES = {
    **dict.fromkeys(("tp", "cp", "pp", "vpp", "mbs", "dp", "micro_batch_size", "offload_alpha", *_AXES), _LAYOUT),
    **dict.fromkeys(("num_gpus", "n_gpus", "ngpus"), "memo calls it gpus"),
    "gpu": "memo calls it hardware, such as 'h100-80'; gpus is how many there are",
    **dict.fromkeys(("batch_size", "train_batch_size"), "memo calls it global_batch_size: of a step, over all GPUs"),
}
_ENTRIES = {name: entry for entry in entries_of(Job) for name in (entry.field, *entry.mark.aliases)}


@functools.wraps(planning.plan)
def plan(*args: Any, **keywords: Any) -> "Plan":
    given: dict[str, Any] = {}
    for name, value in keywords.items():
        entry = None if name in _NOTES else _ENTRIES.get(name)
        field = name if entry is None else entry.field
        if field not in _KEYWORDS:
            raise ConfigError(f"memo.plan: there is no argument '{name}': {_remedy(name)}")
        is_number = entry is not None and int in entry.alternatives and isinstance(value, str)
        given[field] = entry.read(value, f"memo.plan: {name}") if entry is not None and is_number else value
    return planning.plan(*args, **given)


def _remedy(name: str) -> str:
    found = _NOTES.get(name) or advice(name, {*_KEYWORDS, *_ENTRIES}, str, "memo.plan")
    near = difflib.get_close_matches(name, _KEYWORDS, n=1, cutoff=0.5)
    return found or (f"did you mean '{near[0]}'?" if near else f"use {', '.join(_KEYWORDS)}")
