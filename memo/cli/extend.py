"""`memo extend`: extends a Hugging Face model to longer texts: stretches its rotary positions, then trains it.

docs/long_context.md has the whole recipe.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memo.artifacts.regular_file import removed_if_unused
from memo.config import RunConfig
from memo.config.derived import world_size_from_env
from memo.config.evaluation_run import LONGER_THAN_ANY_RUN, for_evaluation
from memo.config.extend import ExtensionMethod, extend_context
from memo.config.flags import parse_command
from memo.config.launching import check_ranks
from memo.config.require import require
from memo.train.stop import GracefulStop

if TYPE_CHECKING:
    from memo.train.evaluation import LossByPosition

ABOUT = (
    "Extend a Hugging Face model to texts of --seq-len tokens: stretch its rotary positions, train on long samples, "
    "write it for Hugging Face to --out, and print perplexities by position before and after. Takes every flag of "
    "`memo train`, also under torchrun."
)
EXAMPLES = (
    "memo extend --model Qwen3-0.6B --seq-len 64K --data-path data/long --eval-data-path data/long-eval --save "
    "runs/long --out Qwen3-0.6B-64K",
    "torchrun --nproc-per-node 8 -m memo extend --model Llama-3.1-8B --seq-len 512K --tp 8 --method yarn --data-path "
    "data/long --eval-data-path data/long-eval --train-iters 200 --save runs/long --out Llama-512K",
)


@dataclass(frozen=True)
class _Options:
    method: ExtensionMethod = "rope-base"
    """rope-base: a larger base slows the rotation of all dims, most of the slowest; yarn: stretches only slow dims."""
    out: str | None = None
    """Directory for the extended model in Hugging Face's format."""


def main(argv: Sequence[str]) -> None:
    """Evaluate, stretch, evaluate, train, evaluate, export.

    Raises MemoError for a run that cannot start, if possible before torch is loaded.
    """
    config, options = parse_command(argv, _Options(), prog="memo extend", about=ABOUT, examples=EXAMPLES)
    config = _checked(config, options)
    check_ranks(config, "memo extend", argv)
    extended = replace(config, model=extend_context(config.model, config.data.seq_length, options.method))
    with GracefulStop().listening() as stop, removed_if_unused(config.checkpoint.save):
        from memo.checkpoint.hugging_face.exporter import export_run
        from memo.train.evaluation import compare_positions
        from memo.train.outputs import check_files
        from memo.train.trainer import Trainer

        check_files(config)
        found = {"as it is": _evaluate(config)}
        with Trainer(config=extended, stop=stop) as trainer:
            trainer.print_header()
            begun = f"at iteration {trainer.iteration}" if trainer.iteration else "stretched"
            found[begun] = trainer.evaluate_positions()
            trainer.log_evaluation(found[begun])
            trainer.train()
            if trainer.was_stopped:  # by a signal, whose sender waits for the end
                return
            found["trained"] = trainer.evaluate_positions()
            trainer.log_evaluation(found["trained"])
            trainer.print(compare_positions(found))
            is_first = trainer.mesh.rank == 0
        if is_first and options.out is not None:
            # PEFT's adapter files do not say how positions are stretched.
            exported = export_run(config, options.out, alone=False)
            print(f"{exported.path}: {exported.architecture} for {config.data.seq_length} tokens")


def _checked(config: RunConfig, options: _Options) -> RunConfig:
    """Check the flags before anything is built: evaluations need data, and the export needs a checkpoint."""
    checkpoint = config.checkpoint
    require(checkpoint.pretrained_checkpoint, "there is nothing to extend: give --model DIR, a Hugging Face directory")
    require(config.data.eval_data_path, "perplexities need held-out texts: give --eval-data-path PREFIX")
    if options.out is not None:
        require(checkpoint.save, f"--out {options.out} is written from a checkpoint: give --save DIR")
        require(not Path(options.out).exists(), f"--out {options.out} exists: give another directory, or remove it")
    if not config.training.eval_interval:  # only before and after
        return config.override({"eval_interval": LONGER_THAN_ANY_RUN})
    return config


def _evaluate(config: RunConfig) -> "LossByPosition":
    """Evaluate the original model, even if the run resumes from a checkpoint of the extended model."""
    from memo.train.trainer import Trainer

    # The length is that of the run on purpose: no warning that nothing stretches the positions.
    model = replace(config.model, max_position_embeddings=config.data.seq_length)
    config = replace(config, model=model, checkpoint=replace(config.checkpoint, load=None))
    with Trainer(config=for_evaluation(config, world_size_from_env())) as trainer:
        return trainer.evaluate_positions()
