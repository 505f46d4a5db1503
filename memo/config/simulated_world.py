"""One rank of a larger job alone on one device: what `--simulate-world tp=8,pp=2` means."""

import math
import re

from memo.config.derived import world_size_from_env
from memo.config.flag import LARGEST
from memo.config.parallel import ParallelConfig
from memo.config.require import require
from memo.config.run import RunConfig

_AXES = ("tp", "cp", "pp", "dp")


def with_simulated_axes(config: RunConfig) -> RunConfig:
    """The configuration with the axes that --simulate-world names in the places of --tp, --cp and --pp.

    Raises ConfigError for a text that names no axes, and for an axis that its own flag sets to another size.
    """
    parallel = config.parallel
    sizes = _sizes(parallel)
    if sizes is None:
        return config
    for axis in ("tp", "cp", "pp"):
        given, size = getattr(parallel, axis), sizes.get(axis, 1)
        require(
            given in (1, size),
            f"--{axis} is {given}, but --simulate-world {parallel.simulate_world} has {axis}={size}: give it in one "
            "place",
        )
    return config.override({axis: size for axis, size in sizes.items() if axis != "dp"})


def _sizes(parallel: ParallelConfig) -> dict[str, int] | None:
    """{axis: size} of --simulate-world; None without it."""
    text = parallel.simulate_world
    if text is None:
        return None
    parts = [re.fullmatch(r"(tp|cp|pp|dp)=([1-9]\d*)", part.strip()) for part in text.split(",")]
    names = [part[1] for part in parts if part]
    require(
        all(parts) and len(set(names)) == len(parts),
        f"--simulate-world {text!r} names no axes: give each of {', '.join(_AXES)} at most once, such as tp=8 or "
        "tp=4,cp=2,pp=2",
    )
    return {part[1]: int(part[2]) for part in parts if part}


def run_world_size(parallel: ParallelConfig) -> int:
    """Ranks of the run: those that --simulate-world names, else as torchrun states them. Raises ConfigError."""
    started, sizes = world_size_from_env(), _sizes(parallel)
    text, rank = parallel.simulate_world, parallel.simulate_rank
    if sizes is None:
        return started
    world_size = math.prod(sizes.values())
    require(
        started == 1,
        f"--simulate-world {text} runs one rank alone, but {started} processes were started: start one, without "
        "torchrun",
    )
    require(world_size <= LARGEST, f"--simulate-world {text} has {world_size} ranks: give {LARGEST} or fewer")
    require(
        0 <= rank < world_size,
        f"--simulate-rank {rank} is not among the {world_size} ranks of --simulate-world {text}: give 0 to "
        f"{world_size - 1}",
    )
    return world_size
