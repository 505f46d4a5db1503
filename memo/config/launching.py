"""The torchrun command of a run: what to type where several ranks are asked for and nothing has started them."""

import os
import shlex
from collections.abc import Sequence

from memo.config.checks import check
from memo.config.run import RunConfig
from memo.config.simulated import run_world_size
from memo.errors import ConfigError

GPUS_PER_NODE = 8
"""Of the machines that most clusters have; a command for more GPUs names several nodes."""


def torchrun(prog: str, argv: Sequence[str], ranks: int) -> str:
    """The command that starts `ranks` ranks of `prog`, such as "memo train" or "examples/finetune.py"."""
    program = f"-m {prog}" if prog.startswith("memo ") else prog
    per_node = next(size for size in range(min(ranks, GPUS_PER_NODE), 0, -1) if ranks % size == 0)
    nodes = "" if ranks == per_node else f"--nnodes {ranks // per_node} "
    return f"torchrun {nodes}--nproc-per-node {per_node} {program} {shlex.join(argv)}".rstrip()


def wanted_ranks(config: RunConfig) -> int:
    """Ranks of this run: as started, or as --simulate-world names them; of one copy of the model where nothing has
    started this process."""
    ranks = run_world_size(config.parallel)
    return ranks if ranks != 1 or "WORLD_SIZE" in os.environ else config.parallel.model_ranks


def check_ranks(config: RunConfig, prog: str, argv: Sequence[str]) -> None:
    """Checks a run against its ranks.

    Raises ConfigError as `check`; where one copy of the model needs several ranks and nothing has started this process,
    with the command that does.
    """
    needed, parallel = wanted_ranks(config), config.parallel
    check(config, needed)
    if needed == run_world_size(parallel):
        return
    where = "" if needed <= GPUS_PER_NODE else ", on each node, with --rdzv-endpoint as in docs/launching.md"
    raise ConfigError(
        f"--tp {parallel.tp} x --cp {parallel.cp} x --pp {parallel.pp} = {needed} ranks hold one copy of the model, "
        f"but this is one process: start them{where}: {torchrun(prog, argv, needed)}"
    )
