"""Configurations through the real parser: what is accepted and derived, and fields that nothing reads.

Wrong ones are in tests/cli/refusals.txt.
"""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from memo.config import PRESETS, RunConfig, preset
from memo.config.check_fields import check_fields
from memo.config.checks import check
from memo.config.derived import (
    global_batch_size,
    layer_tiles,
    num_microbatches,
    resident_tiles,
    resolved_a2a_size,
    resolved_lr,
    resolved_lr_warmup_iters,
    resolved_lr_wsd_decay_iters,
    resolved_memory_planner,
    resolved_offload_tiles,
    vocab_rows_per_rank,
)
from memo.config.flag import ReadWith, reading_marks
from memo.config.flag_table import entries_of
from memo.config.flags import load_run, parse_run
from memo.config.run import read_toml, section_of
from memo.config.training import TrainingConfig
from memo.errors import ConfigError
from memo.spec.parameters import check_patterns_of

MARKED = [
    (section.name, name, mark)
    for section in fields(RunConfig)
    for name, marks in reading_marks(type(getattr(RunConfig(), section.name))).items()
    for mark in marks
]
"""(section, field, the other field with which it is read)."""
TEXTS = {
    "layer_types": "linear,full",
    "moe_layer_freq": "[1]*4",
    "no_rope_freq": "[0,0,0,1]",
    "lora_target_modules": "q_proj",
    "rope_short_factor": "1.5,2",
    "rope_long_factor": "1.5,2",
    "split": "98,2",
    "load_accept_changes": "seq_length",
}


OFF = {"position_embedding_type": "learned_absolute", "offload_alpha": "off", "recompute_granularity": "full"}
OFF |= {"memory_planner": "off"}
"""Values of other fields with which the marked ones are not read, where these are not their defaults."""


def another_value(section: object, name: str) -> object:
    """A value that the field takes, and that is not its default."""
    entry = next(entry for entry in entries_of(type(section)) if entry.field == name)
    if entry.choices:
        return next(word for word in entry.choices if word != entry.default)
    if entry.hint in (int, float):
        return 0.5 if name == "rotary_percent" or (entry.default is None and entry.hint is float) else 8
    text = TEXTS.get(name, "there")
    return not entry.default if entry.is_switch else (text,) if entry.is_list else text


@pytest.mark.parametrize(("section", "name", "mark"), MARKED, ids=lambda value: getattr(value, "field", value))
def test_a_field_that_nothing_reads(section: str, name: str, mark: ReadWith) -> None:
    """The others with which it is read have such values, but for one."""
    config, values = RunConfig(), {name: another_value(getattr(RunConfig(), section), name)}
    for each in (*reading_marks(type(getattr(config, section)))[name], mark):
        other = getattr(config, section_of(each.field, ""))
        default = getattr(other, each.field)
        read = default if each.accepts(default) else each.values[0] if each.values else another_value(other, each.field)
        values[each.field] = OFF.get(each.field, default) if each is mark else read
    for field, value in values.items():
        of = section_of(field, "")
        config = replace(config, **{of: replace(getattr(config, of), **{field: value})})
    with pytest.raises(ConfigError) as refused:
        check_fields(config, section)
    message = str(refused.value)
    assert f" has no use where --{mark.field.replace('_', '-')} is " in message
    assert any(message.split()[0] in (f"--{each}", f"--no-{each}") for each in (n.replace("_", "-") for n in values))
    assert ": give --" in message and message.endswith(", or leave it out")


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("", 1),
        ("--tp 2 --cp 2 --pp 2 --gbs 4", 8),
        ("--pp 2 --vpp 2 --gbs 4", 2),
        ("--cp 4 --cp-comm-type a2a", 4),
        ("--cp 8 --cp-comm-type a2a+p2p", 8),
        ("--cp 8 --cp-comm-type a2a+p2p --cp-a2a-size 2", 8),
        ("--model llama-tiny --tp 2 --seq-len 62", 2),
        ("--model llama-tiny --rope-scaling-type yarn --rope-scaling-factor 8 --rope-beta-fast 16", 1),
        ("--model gpt2-tiny --hidden-size 36 --max-position-embeddings 1024", 1),
        ("--hidden-size 130 --kv-channels 32", 1),
        ("--train-iters 1 --lr-warmup-iters 1", 1),
        ("--train-iters 5 --lr-warmup-iters 9 --lr-decay-style constant", 1),
        ("--lr-decay-style WSD --train-iters 3", 1),
        ("--eval-interval 5", 1),
        ("--device cuda --attention-backend flash", 1),
        # Memory.
        ("--offload-alpha off", 1),
        ("--offload-alpha off --recompute-granularity full", 1),
        ("--offload-alpha off --seq-length 1001", 1),
        ("--offload-alpha 0", 1),
        ("--offload-alpha 1 --offload-policy paper", 1),
        ("--offload-alpha 0.5 --offload-tiles 5 --seq-length 1000", 1),
        ("--offload-alpha 0.5 --seq-length 1088 --cp 2 --tp 2", 4),
        ("--offload-alpha auto --offload-backend virtual --offload-check-races", 1),
        ("--offload-alpha off --profile-cache cache", 1),
        ("--layer-profile p.json --profile-cache off", 1),
        ("--offload-alpha auto --offload-backend cuda --device cuda", 1),
        ("--offload-alpha auto --offload-backend threads --device cpu --offload-host-memory-gib 0.5", 1),
        ("--memory-planner-min-bytes 64", 1),
        ("--memory-planner-min-bytes 64 --device cuda", 1),
        ("--memory-planner-min-bytes 64 --device cpu --memory-planner flat", 1),
        # What is trained.
        ("--model llama-tiny --freeze embedding.weight,layers.[01].*", 1),
        ("--model llama-tiny --freeze layers.*.attention.[qkv].weight", 1),
        ("--model llama-tiny --train-only *norm.weight", 1),
        ("--model llama-tiny --lora-rank 4 --train-only embedding.weight", 1),
        ("--model gpt2-tiny --lora-rank 4 --lora-alpha 8 --lora-use-rslora --lora-target-modules q_proj,up_proj", 1),
        ("--model qwen3-moe-tiny --lora-rank 4 --lora-target-modules gate_proj", 1),
        ("--model qwen3.5-tiny --lora-rank 4 --lora-target-modules q_proj", 1),
        ("--model qwen3-moe-tiny --freeze layers.1.mlp.experts.*", 1),
    ],
)
def test_accepted(flags: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    config = load_run(["--mock-data", "--vocab-size", "61", *flags.split()])
    check_patterns_of(config.model, config.data.seq_length)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_on_one_rank(name: str) -> None:
    check(RunConfig(model=preset(name)).override({"mock_data": True}), world_size=1)


def test_a_caller_with_its_own_datasets_names_none() -> None:
    config = RunConfig().override({"eval_interval": 5})
    check(config, world_size=1, needs_data=False)
    with pytest.raises(ConfigError, match="--data-path"):
        check(config, world_size=1)


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--cp 8", 1),
        ("--cp 8 --cp-comm-type all_gather", 1),
        ("--cp 4 --cp-comm-type a2a", 4),
        ("--cp 8 --cp-comm-type a2a+p2p", 4),  # four heads
        ("--cp 8 --cp-comm-type a2a+p2p --tp 2", 2),  # two heads a tp rank
        ("--cp 8 --cp-comm-type a2a+p2p --num-query-groups 1", 1),
        ("--cp 6 --cp-comm-type a2a+p2p", 2),
        ("--cp 8 --cp-comm-type a2a+p2p --cp-a2a-size 2", 2),
    ],
)
def test_resolved_a2a_size(flags: str, size: int) -> None:
    config = parse_run(flags.split(), prog="test")
    assert resolved_a2a_size(config.model, config.parallel) == size


def test_derived_batch() -> None:
    config = parse_run(["--tp", "2", "--cp", "2", "--mbs", "2", "--gbs", "24"], prog="test")
    assert config.parallel.dp(16) == 4
    assert num_microbatches(config, 16) == 3
    default = parse_run(["--tp", "2", "--mbs", "3"], prog="test")
    assert global_batch_size(default, 8) == 12
    assert num_microbatches(default, 8) == 1


@pytest.mark.parametrize(
    ("flags", "tiles"),
    [
        ("--seq-len 1048576", 8),
        ("--seq-len 1048576 --offload-granularity tile", 32),
        ("--seq-len 1048576 --offload-granularity tile --tp 2 --cp 2 --cp-comm-type a2a", 16),
        ("--seq-len 3145728 --offload-granularity tile --offload-slot-tiles 4", 96),
        ("--seq-len 917504 --offload-granularity tile --offload-slot-tiles 4", 28),
        ("--seq-len 880640 --offload-granularity tile --offload-slot-tiles 4", 20),
        ("--seq-len 65536 --offload-granularity tile", 8),
        ("--seq-len 1048576 --offload-granularity tile --offload-tiles 256", 256),
        ("--seq-len 12 --tp 2 --offload-alpha auto", 6),
        ("--seq-len 65536 --offload-alpha 0.5", 8),
        ("--model qwen3-30b-a3b --seq-len 65536", 2),
        ("--model qwen3-30b-a3b --seq-len 65536 --cp 2 --mbs 2", 2),
        ("--model qwen3-30b-a3b --seq-len 16384", 1),
        ("--model qwen3-30b-a3b --seq-len 1048576", 8),
        ("--model qwen3-30b-a3b --seq-len 65536 --offload-tiles 8", 8),
        ("--model qwen3-30b-a3b --seq-len 65536 --offload-alpha 0.5", 8),
        ("--model qwen3-30b-a3b --seq-len 65536 --lora-rank 8", 2),
    ],
)
def test_tiles_that_nobody_names(flags: str, tiles: int) -> None:
    """Eight, but fewer for experts, which have 2,048 rows or more in each; and where layers are swept as many
    as give a rank 32,768 tokens of each, or a little more."""
    assert resolved_offload_tiles(parse_run(flags.split(), prog="test")) == tiles


@pytest.mark.parametrize(("model", "tiles"), [("llama-3.1-8b", 16), ("qwen3-30b-a3b", 4), ("qwen3.5-35b-a3b", 2)])
def test_tiles_without_a_swap_plan(model: str, tiles: int) -> None:
    """Of 8,192 tokens of a rank, or of 2,048 rows for each expert; or as many as a swap plan is told to have."""
    run = parse_run(["--model", model, "--seq-len", "131072", "--offload-alpha", "off"], prog="test")
    assert resident_tiles(run) == layer_tiles(run) == tiles
    assert resident_tiles(run.override({"offload_alpha": "auto", "offload_tiles": 8})) == 8


def test_derived_sizes() -> None:
    assert vocab_rows_per_rank(50257, 1) == 50304
    assert vocab_rows_per_rank(50257, 4) == 12608
    assert vocab_rows_per_rank(64, 2) == 64
    assert resolved_lr_wsd_decay_iters(TrainingConfig(train_iters=3)) == 1
    assert resolved_lr_wsd_decay_iters(TrainingConfig(lr_decay_iters=50)) == 5


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        ("", (3e-4, 1)),
        ("--pretrained-checkpoint a", (1e-5, 10)),
        ("--pretrained-checkpoint a --lora-rank 4", (1e-4, 10)),
        ("--pretrained-checkpoint a --preference dpo --reference-log-probs b", (5e-7, 10)),
        ("--pretrained-checkpoint a --preference ipo --lora-rank 4", (5e-6, 10)),
        ("--pretrained-checkpoint a --preference ipo --lora-rank 4 --lr 1e-3 --lr-warmup-iters 5", (1e-3, 5)),
    ],
)
def test_the_learning_rate_that_nobody_names(flags: str, rate: tuple[float, int]) -> None:
    run = parse_run([*flags.split(), "--data-path", "x"], prog="test")
    assert (resolved_lr(run), resolved_lr_warmup_iters(run)) == rate


@pytest.mark.parametrize(
    ("word", "value"), [("off", "off"), ("auto", "auto"), ("0", 0.0), ("1", 1.0), ("0.125", 0.125)]
)
def test_alpha_is_a_word_or_a_number_and_survives_toml(word: str, value: str | float, tmp_path: Path) -> None:
    config = parse_run(["--offload-alpha", word, "--mock-data"], prog="test")
    assert config.memory.offload_alpha == value and type(config.memory.offload_alpha) is type(value)
    assert config.memory.swaps == (word != "off")
    (tmp_path / "run.toml").write_text(config.to_toml())
    assert RunConfig().override(read_toml(tmp_path / "run.toml")) == config


@pytest.mark.parametrize(
    ("flags", "on_cuda", "on_cpu"),
    [
        ("", "auto", "off"),
        ("--memory-planner off", "off", "off"),
        ("--data-path c", "auto", "off"),
        ("--data-path c --no-packing", "auto", "off"),
        ("--data-path c --memory-planner flat", "flat", "flat"),
    ],
)
def test_memory_is_planned_by_default_on_cuda(flags: str, on_cuda: str, on_cpu: str) -> None:
    config = parse_run([*flags.split(), "--mock-data"], prog="test")
    assert resolved_memory_planner(config.memory, "cuda") == on_cuda
    assert resolved_memory_planner(config.memory, "cpu") == on_cpu
    assert config.memory.plans == (on_cpu != "off")  # the default is not known yet
    assert config.override({"memory_planner": on_cuda}).memory.plans == (on_cuda != "off")
