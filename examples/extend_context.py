"""Extend a model of Hugging Face to longer texts: stretch its rotary positions, train on long samples, export.

Every flag of `memo train` works, and `--help` shows whole commands. What it prints at the end is the perplexity by
position: of the model as it is, of the same weights with stretched positions, and of the trained model.
docs/long_context.md has the whole recipe.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from memo import Trainer
from memo.checkpoint.hugging_face import export_checkpoint
from memo.config import RunConfig
from memo.config.derived import world_size_from_env
from memo.config.evaluation_run import for_evaluation
from memo.config.extend import ExtensionMethod, extend_context
from memo.config.flags import parse_command
from memo.config.launching import check_ranks
from memo.config.require import require
from memo.errors import exit_on_error
from memo.train.evaluation import LossByPosition, compare_positions
from memo.train.outputs import check_files
from memo.train.stop import GracefulStop

PROGRAM = "examples/extend_context.py"
LONGER_THAN_ANY_RUN = 1 << 40
"""Steps."""
EXAMPLES = (
    "python examples/extend_context.py --model Qwen3-0.6B --seq-len 64K --data-path data/long --eval-data-path "
    "data/long-eval --save runs/long --out Qwen3-0.6B-64K",
    "torchrun --nproc-per-node 8 examples/extend_context.py --model Llama-3.1-8B --seq-len 512K --tp 8 --method yarn "
    "--data-path data/long --eval-data-path data/long-eval --train-iters 200 --save runs/long --out Llama-512K",
)


@dataclass(frozen=True)
class Options:
    """How a model is extended."""

    method: ExtensionMethod = "rope-base"
    """rope-base: a larger base turns all dims more slowly, the slowest most; yarn: only slow dims are stretched."""
    out: str | None = None
    """Directory for the extended model in Hugging Face's format."""


def main() -> None:
    """Evaluate, stretch, evaluate, train, evaluate, export."""
    about = __doc__.splitlines()[0]
    config, options = parse_command(sys.argv[1:], Options(), prog=PROGRAM, about=about, examples=EXAMPLES)
    with exit_on_error(needs_output=False), GracefulStop().listening() as stop:
        config = checked(config, options)
        extended = replace(config, model=extend_context(config.model, config.data.seq_length, options.method))
        found = {"as it is": evaluate(config)}
        with Trainer(config=extended, stop=stop) as trainer:
            trainer.print_header()
            found["stretched"] = trainer.evaluate_positions()
            trainer.train()
            if trainer.was_stopped:  # by a signal: whoever sent it waits
                return
            found["trained"] = trainer.evaluate_positions()
            trainer.print(compare_positions(found))
            is_first = trainer.mesh.rank == 0
        if is_first and options.out is not None:
            exported = export_checkpoint(str(config.checkpoint.save), options.out)
            print(f"{exported.path}: {exported.architecture} for {config.data.seq_length} tokens")


def checked(config: RunConfig, options: Options) -> RunConfig:
    """What can be refused is refused before anything is built. Evaluations need data, the export a checkpoint."""
    checkpoint = config.checkpoint
    require(checkpoint.pretrained_checkpoint, "there is nothing to extend: give --model DIR, a Hugging Face directory")
    require(config.data.eval_data_path, "perplexities need held-out texts: give --eval-data-path PREFIX")
    if options.out is not None:
        require(checkpoint.save, f"--out {options.out} is written from a checkpoint: give --save DIR")
        require(not Path(options.out).exists(), f"--out {options.out} exists: give another directory, or remove it")
    if not config.training.eval_interval:  # only before and after
        config = config.override({"eval_interval": LONGER_THAN_ANY_RUN})
    check_ranks(config, PROGRAM, sys.argv[1:])
    check_files(config)
    return config


def evaluate(config: RunConfig) -> LossByPosition:
    """Of the weights as they are, also where the run goes on from a checkpoint of the extended model."""
    config = replace(config, checkpoint=replace(config.checkpoint, load=None))
    with Trainer(config=for_evaluation(config, world_size_from_env())) as trainer:
        return trainer.evaluate_positions()


if __name__ == "__main__":
    main()
