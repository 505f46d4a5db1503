"""Rules about training on pairs of answers (--preference)."""

from memo.config.derived import global_batch_size
from memo.config.require import require
from memo.config.run import RunConfig
from memo.config.unread import require_with


def check_preference(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError. Whether the data are pairs is known once they are opened."""
    training, data, model = config.training, config.data, config.model
    require_with(training, "preference_beta", training.preference, "--preference", "dpo")
    require_with(data, "reference_log_probs", training.preference, "--preference", "dpo")
    if training.preference is None:
        return
    flag = f"--preference {training.preference}"
    has_adapters_alone = model.lora_rank and not model.train_only
    trained = f"--train-only {model.train_only} trains more than adapters" if model.lora_rank else "--lora-rank is 0"
    require(
        has_adapters_alone or data.reference_log_probs is not None,
        f"{flag} needs a reference, which is the model without its adapters, but {trained}: give --lora-rank 16, or "
        "--reference-log-probs FILE, which the run writes before its first step",
    )
    require(not data.mock_data, f"{flag} fights with --mock-data, which has no pairs: give --data-path")
    require(
        not training.eval_positions,
        f"{flag} fights with --eval-positions: pairs have losses, and tokens have none: leave one of the two out",
    )
    batch = global_batch_size(config, world_size)
    require(
        batch % 2 == 0,
        f"{flag} has a chosen answer in one sequence and the rejected one in the next, but --global-batch-size is "
        f"{batch}: give an even number",
    )
