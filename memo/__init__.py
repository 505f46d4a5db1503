"""memo trains and extends LLMs at 64K to millions of tokens on few GPUs.

Importing this package loads nothing heavy: planning, estimating and `memo --help` must answer
on a laptop in milliseconds, so torch is imported only when a name that needs it is first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["RunConfig", "Trainer", "__version__", "plan"]

if TYPE_CHECKING:
    from memo.config import RunConfig
    from memo.search.planning import plan
    from memo.train.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from memo.train.trainer import Trainer

        return Trainer
    if name == "RunConfig":
        from memo.config import RunConfig

        return RunConfig
    if name == "plan":
        from memo.search.planning import plan

        return plan
    raise AttributeError(f"module 'memo' has no attribute {name!r}")
