"""memo trains and extends LLMs at 64K to millions of tokens on few GPUs.

Importing this package loads nothing heavy: planning, estimating and `memo --help` must answer
on a laptop in milliseconds, so torch is imported only when a name that needs it is first used.
docs/python.md has an example of each name.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "CustomLayer",
    "LayerParts",
    "Plan",
    "RunConfig",
    "StepRecord",
    "Trainer",
    "__version__",
    "plan",
]

if TYPE_CHECKING:
    from memo.artifacts.run_log import StepRecord
    from memo.config import RunConfig
    from memo.model.custom import CustomLayer, LayerParts
    from memo.search import Choice, Plan
    from memo.search.planning import plan
    from memo.train.trainer import Trainer

_MODULE_OF = {
    "Choice": "memo.search",
    "CustomLayer": "memo.model.custom",
    "LayerParts": "memo.model.custom",
    "Plan": "memo.search",
    "RunConfig": "memo.config",
    "StepRecord": "memo.artifacts.run_log",
    "Trainer": "memo.train.trainer",
    "plan": "memo.cli.python",
}
"""The module that defines each public name; it is imported when the name is first used."""


if not os.path.exists("/dev/nvidiactl"):  # torch computes on CPUs
    # torch's OpenMP reads this when it is loaded, so it is set here, before torch. By default threads that wait for
    # each other spin, and on a machine with other work they take time from threads that compute: 12 steps of
    # llama-tiny took 34.6 s with spinning threads, and 6.9 s with sleeping ones. A value that the user has set stays.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'memo' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
