"""`memo evaluate`: the loss of a model by position, and its recall of needles by distance."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memo.artifacts.regular_file import replace_file
from memo.config import RunConfig
from memo.config.blend import read_blend, read_eval_sets
from memo.config.check_fields import check_values
from memo.config.evaluation_run import for_evaluation, require_weights
from memo.config.flag_table import changed, dashed
from memo.config.flags import parse_command
from memo.config.launching import check_ranks, wanted_ranks
from memo.config.require import require
from memo.data import CorpusFacts, NeedleDataset
from memo.data.needle import check_needles
from memo.errors import ConfigError, writing

if TYPE_CHECKING:
    from memo.train.trainer import Trainer

ABOUT = (
    "Print loss and perplexity by position for --model DIR, or for the newest checkpoint of the run in --load DIR, "
    "over --eval-iters global batches of --eval-data-path, or else of --data-path. Takes every flag of `memo train`, "
    "also under torchrun; --load DIR brings the flags of its run. Flags of checkpoints to write, logs and planned "
    "memory are ignored."
)

EXAMPLES = (
    "memo evaluate --model Llama-3.1-8B --data-path data/long-eval --seq-len 128K --needle",
    "torchrun --nproc-per-node 8 -m memo evaluate --load runs/a --tp 8 --seq-len 128K",
)


@dataclass(frozen=True)
class _Options:
    """Options besides those of a run."""

    needle: bool = False
    """Hide keys with values in the texts, ask for the values at the end, and print how many are found by distance."""
    num_needles: int = 8
    """With --needle: number of pairs hidden in a sample, evenly spread."""
    key_length: int = 4
    """With --needle: tokens of a key."""
    value_length: int = 4
    """With --needle: tokens of a value; a value is found if all are right."""
    out: str | None = None
    """JSON file for the figures."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot start, if possible before torch is loaded."""
    config, options = parse_command(
        argv, _Options(), prog="memo evaluate", about=ABOUT, examples=EXAMPLES, reads_run=True
    )
    check_values(config)
    config = for_evaluation(config, wanted_ranks(config.parallel))
    _check_options(config, options)
    check_ranks(config, "memo evaluate", argv)
    from memo.train.outputs import check_writable
    from memo.train.trainer import Trainer

    check_writable("--out", options.out, is_directory=False)
    with Trainer(config=config) as trainer:
        found: dict[str, Any] = {"iteration": trainer.iteration}
        for name in trainer.eval_sets:
            by_position = trainer.evaluate_positions(name=name)
            where = found.setdefault("sets", {}).setdefault(name, {}) if name else found
            where["positions"] = asdict(by_position)
            trainer.print(f"{name}:\n{by_position.table()}" if name else by_position.table())
        if options.needle:
            recall = trainer.evaluate_needles(_needles(trainer, options))
            found["needles"] = asdict(recall)
            trainer.print(f"\n{recall.table()}")
        if options.out is not None and trainer.mesh.rank == 0:
            with writing(f"--out {options.out}", ConfigError):
                replace_file(options.out, json.dumps(found, indent=1) + "\n")


def _check_options(config: RunConfig, options: _Options) -> None:
    require_weights(config)
    if options.needle:
        lengths = (options.num_needles, options.key_length, options.value_length)
        check_needles(config.data.seq_length, *lengths)
        return
    for name, value in changed(options).items():
        require(
            name == "out",
            f"{dashed(name)} {value} is read with --needle alone, which is not given: give both or none",
        )


def _needles(trainer: "Trainer", options: _Options) -> NeedleDataset:
    config = trainer.config
    given = config.data.eval_data_path or config.data.data_path
    words = None if given is None else next(iter(read_eval_sets(given).values()))
    prefixes = () if words is None else read_blend("--eval-data-path", words).prefixes
    ends = {CorpusFacts.load(prefix).eod for prefix in prefixes if os.path.exists(f"{prefix}.json")}
    return NeedleDataset(
        next(iter(trainer.eval_sets.values())),
        config.training.seed,
        num_needles=options.num_needles,
        key_length=options.key_length,
        value_length=options.value_length,
        avoid=sorted(ends),
    )
