"""Rules about what is trained: frozen parameters, and the adapters of LoRA."""

from memo.config.model import LORA_TARGETS
from memo.config.require import require
from memo.config.run import RunConfig
from memo.config.unread import require_with

_ALL = "all-linear"


def check_trained(config: RunConfig) -> None:
    """Raises ConfigError. Whether the patterns name any parameter is checked by memo.spec.parameters."""
    model, checkpoint = config.model, config.checkpoint
    require_with(checkpoint, "lora_checkpoint", model.lora_rank, "--lora-rank", "16")
    require_with(checkpoint, "lora_checkpoint", checkpoint.pretrained_checkpoint, "--model", "DIR")
    require(
        not (model.freeze and model.train_only),
        f"--freeze {model.freeze} fights with --train-only {model.train_only}: give the shorter one of the two",
    )
    coded = f"--quantize {model.quantize}"
    is_frozen = model.lora_rank or model.freeze or model.train_only
    require(
        model.quantize == "none" or is_frozen,
        f"{coded} is of frozen matrices, and everything is trained: give --lora-rank 16, --freeze or --train-only",
    )
    require(
        model.quantize == "none" or not model.custom_layer,
        f"--custom-layer {model.custom_layer} fights with {coded}, which is of memo's own layer: leave one of the two "
        "out",
    )
    for name in ("lora_alpha", "lora_use_rslora", "lora_target_modules"):
        require_with(model, name, model.lora_rank, "--lora-rank", "16")
    if not model.lora_rank:
        return
    require(
        not model.freeze,
        f"--freeze {model.freeze} fights with --lora-rank {model.lora_rank}, which freezes the whole model: leave it "
        "out, or name what is trained beside the adapters with --train-only",
    )
    require(
        not model.custom_layer,
        f"--custom-layer {model.custom_layer} fights with --lora-rank {model.lora_rank}: memo has adapters beside the "
        "matrices of its own layer; leave one of the two out",
    )
    for target in model.lora_target_modules.split(","):
        require(
            target.strip() in LORA_TARGETS or model.lora_target_modules == _ALL,
            f"--lora-target-modules {model.lora_target_modules} names {target.strip() or 'nothing'}, which is none of "
            f"{', '.join(LORA_TARGETS)}: give some of these with commas between, or {_ALL} alone",
        )
