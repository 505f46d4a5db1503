"""`memo evaluate`: the loss of a model by position, and its recall of needles by distance."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from memo.artifacts.regular_file import replace_file
from memo.config.blend import read_blend, read_eval_sets
from memo.config.evaluation_run import evaluated_run
from memo.config.flag import ReadWith
from memo.data import CorpusFacts, NeedleDataset, PreferencePairs
from memo.data.needle import check_needles
from memo.data.pairs_of_run import evaluates_pairs
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


_NEEDLE = ReadWith("needle")


@dataclass(frozen=True)
class _Options:
    needle: bool = False
    """Hide keys with values in the texts, ask for the values at the end, and print how many are found by distance."""
    num_needles: Annotated[int, _NEEDLE] = 8
    """Number of pairs hidden in a sample, evenly spread."""
    key_length: Annotated[int, _NEEDLE] = 4
    """Tokens of a key."""
    value_length: Annotated[int, _NEEDLE] = 4
    """Tokens of a value; a value is found if all are right."""
    out: str | None = None
    """JSON file for the figures."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot start, if possible before torch is loaded."""
    config, options = evaluated_run(
        argv, _Options(), prog="memo evaluate", about=ABOUT, examples=EXAMPLES, evaluates_pairs=evaluates_pairs
    )
    if options.needle:
        check_needles(config.data.seq_length, options.num_needles, options.key_length, options.value_length)
    from memo.train.outputs import check_writable
    from memo.train.trainer import Trainer

    check_writable("--out", options.out, is_directory=False)
    with Trainer(config=config) as trainer:
        found: dict[str, Any] = {"iteration": trainer.iteration}
        for name, dataset in trainer.eval_sets.items():
            where = found.setdefault("sets", {}).setdefault(name, {}) if name else found
            if isinstance(dataset, PreferencePairs):
                where["loss"] = trainer.evaluate(name=name)
                told = f"loss of a pair: {where['loss']:.4f}"
            else:
                by_position = trainer.evaluate_positions(name=name)
                where["positions"], told = asdict(by_position), by_position.table()
            trainer.print(f"{name}:\n{told}" if name else told)
        if options.needle:
            recall = trainer.evaluate_needles(_needles(trainer, options))
            found["needles"] = asdict(recall)
            trainer.print(f"\n{recall.table()}")
        if options.out is not None and trainer.mesh.rank == 0:
            with writing(f"--out {options.out}", ConfigError):
                replace_file(options.out, json.dumps(found, indent=1) + "\n")


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
