"""The torchrun command of a run, for messages where several ranks are asked for and nothing has started them."""

import os
import shlex
import sys
from collections.abc import Sequence

from memo.config.checks import check
from memo.config.parallel import ParallelConfig
from memo.config.require import require
from memo.config.run import RunConfig
from memo.config.simulated_world import run_world_size

GPUS_PER_NODE = 8
"""GPUs of a node in most clusters; a command for more GPUs names several nodes."""


def this_script() -> str:
    """The Python file that runs, for `torchrun`; SCRIPT.py where there is none."""
    return sys.argv[0] if sys.argv[:1] and sys.argv[0].endswith(".py") else "SCRIPT.py"


def torchrun(prog: str, argv: Sequence[str], ranks: int) -> str:
    """The command that starts `ranks` ranks of `prog`, such as "memo train" or "examples/pretrain_gpt.py"."""
    program = f"-m {prog}" if prog.startswith("memo ") else prog
    per_node = next(size for size in range(min(ranks, GPUS_PER_NODE), 0, -1) if ranks % size == 0)
    return f"{torchrun_nodes(ranks // per_node, per_node)} {program} {shlex.join(argv)}".rstrip()


def torchrun_nodes(nodes: int, per_node: int) -> str:
    """The launcher itself with its flags; with several nodes, to be run on each of them."""
    if nodes == 1:
        return f"torchrun --nproc-per-node {per_node}"
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"
    return f"torchrun --nnodes {nodes} --nproc-per-node {per_node} {rendezvous}"


def wanted_ranks(parallel: ParallelConfig) -> int:
    """Ranks of this run: as started, or as --simulate-world names them; if no launcher has started this process, the
    ranks of one copy of the model."""
    ranks = run_world_size(parallel)
    return ranks if ranks != 1 or "WORLD_SIZE" in os.environ else max(1, parallel.model_ranks)


def check_ranks(
    config: RunConfig, prog: str, argv: Sequence[str], *, needs_data: bool = True, needs_eval_data: bool = True
) -> None:
    """Checks a run against its ranks. Raises ConfigError as `check` and `require_started`."""
    check(config, wanted_ranks(config.parallel), needs_data=needs_data, needs_eval_data=needs_eval_data)
    require_started(config.parallel, prog, argv)


def require_started(parallel: ParallelConfig, prog: str, argv: Sequence[str]) -> None:
    """Raises ConfigError, with the torchrun command of this program (`prog`, `argv`), where one copy of the model needs
    several ranks and nothing has started this process."""
    needed = wanted_ranks(parallel)
    where = "" if needed <= GPUS_PER_NODE else ", on each node (docs/launching.md)"
    require(
        needed == run_world_size(parallel),
        f"--tp {parallel.tp} x --cp {parallel.cp} x --pp {parallel.pp} = {needed} ranks hold one copy of the model, "
        f"but this is one process: start them{where}: {torchrun(prog, argv, needed)}",
    )
