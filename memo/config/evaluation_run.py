"""The configuration of a run that only evaluates."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from memo.config.blend import read_eval_sets
from memo.config.check_fields import check_values
from memo.config.derived import global_batch_size
from memo.config.flags import Options, parse_command
from memo.config.identity import DATA_FACTS, accepted_changes
from memo.config.launching import check_ranks, wanted_ranks
from memo.config.require import require
from memo.config.run import CheckpointConfig, LoggingConfig, RunConfig
from memo.errors import is_reporting_rank, tell

LONGER_THAN_ANY_RUN = 1 << 40
"""An --eval-interval, in steps, of commands that evaluate before and after training only."""


def evaluated_run(
    argv: Sequence[str],
    options: Options,
    *,
    prog: str,
    about: str,
    examples: Sequence[str],
    needs_data: bool = True,
    evaluates_pairs: Callable[[RunConfig], bool] = lambda _: False,
) -> tuple[RunConfig, Options]:
    """The configuration with which a command evaluates the weights of --model or --load, and its own options.

    Without `needs_data` a run may have no corpus: its data are then mock data. A run for which `evaluates_pairs` is
    true keeps --preference. Raises the errors of `parse_command`, and ConfigError for a run that cannot start or names
    no weights.
    """
    config, options = parse_command(argv, options, prog=prog, about=about, examples=examples, reads_run=True)
    check_values(config)
    given = config.data
    config = for_evaluation(config, wanted_ranks(config.parallel), of_pairs=evaluates_pairs(config))
    if not needs_data and config.data.data_path is None:
        config = config.override({"mock_data": True})
    require(
        config.checkpoint.load or config.checkpoint.pretrained_checkpoint,
        "there are no weights: give --model DIR, a Hugging Face directory, or --load DIR, where a run saved",
    )
    check_ranks(config, prog, argv)
    load, is_held_out = config.checkpoint.load, given.eval_data_path or given.holds_out
    if needs_data and load and given.data_path and not is_held_out and is_reporting_rank():
        tell(
            f"warning: the loss is that of --data-path {' '.join(map(str, given.data_path))}, on which the run in "
            f"--load {load} may have been trained: --eval-data-path names other texts"
        )
    return config, options


def for_evaluation(config: RunConfig, world_size: int, *, of_pairs: bool = False) -> RunConfig:
    """`config` for an evaluation of its weights in its layout, on the evaluation data if there are any, else on the
    training data. Its --preference is read for the loss `of_pairs` alone.

    The fields about memory for activations stay, though forwards alone do not use it: a model is admitted for
    evaluation where it is admitted for training. Nothing is saved or logged. The global batch size is stated, as the
    run that saved the checkpoint may have had another one.
    """
    unread = {"reference_log_probs": None} if of_pairs else {"preference": None}
    config = config.replaced({**unread, "memory_planner": "off"})  # and what is read with them alone
    data, checkpoint = config.data, config.checkpoint
    corpus = data.eval_data_path or data.data_path
    read = data  # with --split the parts that were not trained on
    if corpus is not None and not data.mock_data and not data.holds_out:
        first = next(iter(read_eval_sets(corpus).values()))
        read = replace(data, data_path=first, eval_data_path=corpus, split=None)
    batch = global_batch_size(config, world_size)
    return replace(
        config,
        data=read,
        training=replace(
            config.training,
            eval_interval=1,
            global_batch_size=batch,
            num_epochs=None,
        ),
        checkpoint=CheckpointConfig(
            load=checkpoint.load,
            pretrained_checkpoint=checkpoint.pretrained_checkpoint,
            lora_checkpoint=checkpoint.lora_checkpoint,
            verify_checkpoint=checkpoint.verify_checkpoint,
            load_accept_changes=",".join((*accepted_changes(checkpoint.load_accept_changes), *DATA_FACTS))
            if checkpoint.load
            else None,
        ),
        logging=LoggingConfig(),
    )
