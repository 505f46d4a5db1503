"""Wrong configurations through the real parser: each message names the flags, both values and a way out."""

from dataclasses import dataclass, fields, replace

import pytest

from memo.config import PRESETS, RunConfig, preset
from memo.config.check_fields import check_fields
from memo.config.checks import check
from memo.config.derived import (
    data_parallel_size,
    global_batch_size,
    num_microbatches,
    resolved_a2a_size,
    resolved_lr,
    resolved_lr_warmup_iters,
    resolved_lr_wsd_decay_iters,
    resolved_offload_tiles,
    vocab_rows_per_rank,
)
from memo.config.flag import ReadWith, reading_marks
from memo.config.flag_table import entries_of
from memo.config.flags import load_run, parse_run
from memo.config.run import section_of
from memo.errors import ConfigError


@dataclass(frozen=True)
class Wrong:
    """Flags that must be refused on `ranks` ranks, and what the message must contain."""

    flags: str
    says: tuple[str, ...]
    ranks: int = 1
    data: str = "--mock-data"


WRONG = [
    # Ranges.
    Wrong("--num-layers 0", ("--num-layers is 0: give a whole number from 1 to 65536, or the default 4",)),
    Wrong("--vocab-size -5", ("--vocab-size is -5: give a whole number from 1 to 268435456, or leave it out",)),
    Wrong("--norm-epsilon 0", ("--norm-epsilon is 0.0", "above 0", "1e-05")),
    Wrong("--lr -1", ("--lr is -1.0: give a number above 0, or leave it out",)),
    Wrong("--lr nan", ("--lr is nan", "finite")),
    Wrong("--clip-grad -0.5", ("--clip-grad is -0.5: give a number of 0 or more, or the default 1.0",)),
    Wrong("--train-iters 0", ("--train-iters is 0", "default 100")),
    Wrong("--loss-chunk-size 0", ("--loss-chunk-size is 0", "default 1024")),
    Wrong("--ddp-bucket-size 0", ("--ddp-bucket-size is 0", "default 40000000")),
    Wrong("--mbs 0", ("--micro-batch-size is 0", "default 1")),
    Wrong("--kv-channels 0", ("--kv-channels is 0: give a whole number from 1 to 65536",)),
    # The model.
    Wrong(
        "--hidden-size 130",
        ("--hidden-size 130", "--num-attention-heads 4", "--hidden-size 128 or 132", "--kv-channels"),
    ),
    Wrong("--hidden-size 36", ("--hidden-size 36 / --num-attention-heads 4", "9 channels", "such as 10")),
    Wrong("--kv-channels 33", ("--kv-channels", "33 channels", "even --kv-channels such as 34")),
    Wrong("--num-query-groups 3", ("--num-attention-heads 4", "--num-query-groups 3", "1, 2 or 4")),
    Wrong(
        "--rope-scaling-type yarn --rope-scaling-factor 0.5",
        ("--rope-scaling-factor is 0.5: give a number from 1 to 1000000000",),
    ),
    Wrong(
        "--rope-scaling-type llama3 --rope-low-freq-factor 8",
        ("--rope-low-freq-factor 8.0", "--rope-high-freq-factor 4.0", "use 1 and 4"),
    ),
    Wrong(
        "--rope-scaling-type yarn --rope-beta-slow 64",
        ("--rope-beta-slow 64.0", "--rope-beta-fast 32.0", "use 1 and 32"),
    ),
    Wrong("--window-size 64 --layer-types sliding,none", ("--layer-types", "'sliding,none'", "such as sliding,full")),
    Wrong(
        "--model glm-4.5-tiny --moe-router-num-groups 3",
        ("--num-experts 8", "--moe-router-num-groups 3", "of at least two experts: give a divisor"),
    ),
    Wrong("--model glm-4.5-tiny --moe-router-num-groups 8", ("--num-experts 8", "--moe-router-num-groups 8")),
    Wrong(
        "--model glm-4.5-tiny --moe-router-group-topk 5",
        ("--moe-router-group-topk 5", "--moe-router-num-groups 4", "give as many or fewer"),
    ),
    Wrong(
        "--model glm-4.5-tiny --moe-router-group-topk 1 --moe-router-topk 3",
        ("--moe-router-topk 3", "--moe-router-group-topk 1 of --moe-router-num-groups 4", "or more groups"),
    ),
    Wrong(
        "--model qwen3-moe-tiny --norm-placement around",
        ("--norm-placement around", "--num-experts 8", "leave one of the two out"),
    ),
    Wrong("--layer-types sliding,full", ("--layer-types sliding,full", "--window-size 0", "give both, or neither")),
    Wrong(
        "--model gpt2-tiny --max-position-embeddings 512",
        ("--seq-length 1024", "--max-position-embeddings 512", "as many tokens or fewer"),
    ),
    # The layout.
    Wrong(
        "--distributed-timeout-minutes 1e300",
        ("--distributed-timeout-minutes is 1e+300", "give a number from 0.05 to 525600"),
    ),
    Wrong(
        "--distributed-timeout-minutes 1e-9",
        ("--distributed-timeout-minutes is 1e-09", "give a number from 0.05 to 525600"),
    ),
    Wrong("--tp 3", ("1 ranks", "--tp 3 x --cp 1 x --pp 1 = 3", "start 3 ranks")),
    Wrong("--tp 2 --cp 2", ("6 ranks", "= 4", "start 4 or 8 ranks", "1, 2, 3 or 6"), ranks=6),
    Wrong("--tp 8", ("--num-attention-heads 4", "--tp 8", "use --tp 1, 2 or 4"), ranks=8),
    Wrong("--tp 4 --num-query-groups 2", ("--num-query-groups 2", "--tp 4", "use --tp 1 or 2"), ranks=4),
    Wrong(
        "--tp 4 --ffn-hidden-size 510",
        ("--ffn-hidden-size 510", "--tp 4", "--ffn-hidden-size 508 or 512", "--tp 1 or 2"),
        ranks=4,
    ),
    Wrong("--tp 4 --vocab-size 3", ("--vocab-size 3", "--tp 4", "give as many or more"), ranks=4),
    Wrong("--tp 2 --seq-len 1023", ("--seq-length 1023", "--tp 2", "--seq-length 1022 or 1024"), ranks=2),
    Wrong(
        "--tp 2 --cp 2 --seq-len 1028",
        ("--seq-length 1028", "2 x --cp 2 x --tp 2 = 8", "--seq-length 1024 or 1032"),
        ranks=4,
    ),
    Wrong(
        "--cp 8 --cp-comm-type a2a",
        ("--cp-comm-type a2a", "--num-attention-heads 4 / --tp 1 = 4", "--cp 8", "--cp 1, 2 or 4", "a2a+p2p"),
        ranks=8,
    ),
    Wrong(
        "--cp 4 --cp-comm-type a2a --num-query-groups 2",
        ("--num-query-groups 2 / --tp 1 = 2", "--cp 4", "--cp 1 or 2"),
        ranks=4,
    ),
    Wrong(
        "--cp 4 --cp-comm-type a2a+p2p --cp-a2a-size 3",
        ("--cp-a2a-size 3", "--cp 4", "use --cp-a2a-size 1, 2 or 4"),
        ranks=4,
    ),
    Wrong(
        "--cp 8 --cp-comm-type a2a+p2p --cp-a2a-size 8 --tp 2",
        ("--num-attention-heads 4 / --tp 2 = 2", "--cp-a2a-size 8", "use --cp-a2a-size 1 or 2"),
        ranks=16,
    ),
    Wrong("--pp 3", ("--num-layers 4", "--pp 3 x --vpp 1 = 3", "--num-layers 3 or 6", "1, 2 or 4"), ranks=3),
    Wrong("--vpp 2", ("--vpp 2", "with --pp 1 there is one", "--pp 2 or more")),
    Wrong("--pp 2 --vpp 4", ("--num-layers 4", "--pp 2 x --vpp 4 = 8", "--num-layers 8"), ranks=2),
    # The batch.
    Wrong(
        "--gbs 6 --mbs 2",
        ("--global-batch-size 6", "--micro-batch-size 2 x dp 2 = 4", "--global-batch-size 4 or 8"),
        ranks=2,
    ),
    Wrong("--gbs 1", ("--global-batch-size 1", "dp 4 = 4", "use --global-batch-size 4"), ranks=4),
    Wrong(
        "--pp 2 --vpp 2 --gbs 3",
        ("--vpp 2", "--pp 2", "--global-batch-size 3", "= 3", "--global-batch-size 2 or 4"),
        ranks=2,
    ),
    # Optimizer and schedule.
    Wrong("--min-lr 1 --lr 0.5", ("--min-lr 1.0", "--lr 0.5", "give 0.5 or less")),
    Wrong(
        "--exp-avg-sq-dtype bf16 --adam-beta2 0.999",
        ("--exp-avg-sq-dtype bf16", "--adam-beta2 0.999", "would never decay", "--adam-beta2 0.95", "dtype fp32"),
    ),
    Wrong(
        "--exp-avg-dtype bf16 --adam-beta1 0.997",
        ("--exp-avg-dtype bf16", "--adam-beta1 0.997", "--adam-beta1 0.9, or --exp-avg-dtype fp32"),
    ),
    Wrong("--adam-beta2 1", ("--adam-beta2 is 1.0: give a number of 0 or more and below 1, or the default 0.95",)),
    Wrong("--lr-warmup-iters 101", ("--lr-warmup-iters 101", "--train-iters 100", "100 or less")),
    Wrong(
        "--lr-warmup-iters 30 --lr-decay-iters 20",
        ("--lr-warmup-iters 30", "--lr-decay-iters 20", "give 20 or less"),
    ),
    Wrong(
        "--lr-decay-style WSD --lr-wsd-decay-iters 60 --lr-warmup-iters 50",
        ("--lr-wsd-decay-iters 60", "--lr-warmup-iters 50", "step 100", "give 50 or less"),
    ),
    # Data, checkpoints, devices.
    Wrong("--data-path corpus", ("--mock-data", "--data-path corpus", "leave one of the two out")),
    Wrong("", ("--data-path is not given", "--mock-data is off", "memo data demo"), data=""),
    Wrong("--eval-data-path c --eval-interval 5", ("--mock-data", "--eval-data-path c", "leave one")),
    Wrong(
        "--data-path c --eval-interval 5",
        ("--eval-interval 5", "--eval-data-path is not given", "--eval-interval 0"),
        data="",
    ),
    Wrong("--save-interval-minutes -1 --save a", ("--save-interval-minutes is -1.0", "0 or more")),
    Wrong("--min-lr 1e-4 --pretrained-checkpoint a", ("--min-lr 0.0001", "--lr 1e-05", "1e-05 or less")),
    Wrong("--save x --keep-latest-k -1", ("--keep-latest-k is -1: give a whole number from 0 to ",)),
    Wrong("--simulate-world tp=2 --tp 2 --save x", ("--simulate-world tp=2", "--save x", "leave")),
    Wrong("--delta-backend torch", ("--delta-backend torch", "linear", "not given", "leave --delta-backend out")),
    Wrong(
        "--model qwen3.5-tiny --delta-backend fla --device cpu",
        ("--delta-backend fla", "--device cpu", "--delta-backend auto or torch", "--device cuda"),
    ),
    Wrong(
        "--model qwen3.5-tiny --delta-backend fla --params-dtype fp32",
        ("--delta-backend fla", "--params-dtype is fp32", "--params-dtype bf16", "--delta-backend auto"),
    ),
    Wrong(
        "--model qwen3.5-tiny --delta-backend fla --deterministic",
        ("--delta-backend fla", "--deterministic", "by their speed", "leave --deterministic out"),
    ),
    Wrong("--kernels triton --device cpu", ("--kernels triton", "--device cpu", "--kernels torch", "--device cuda")),
    Wrong(
        "--device cuda --attention-backend cpu",
        ("--attention-backend cpu", "--device cuda", "--attention-backend auto", "--device cpu"),
    ),
    Wrong(
        "--device cpu --attention-backend cudnn",
        ("--attention-backend cudnn", "--device cpu", "auto or cpu"),
    ),
    Wrong(
        "--deterministic --attention-backend cudnn",
        ("--attention-backend cudnn", "--deterministic", "same bits each time never", "--attention-backend auto"),
    ),
    Wrong(
        "--deterministic-mode --attention-backend flash_attn_4 --kv-channels 192",
        ("--attention-backend flash_attn_4", "only for heads of up to 128", "heads are of 192"),
    ),
    Wrong(
        "--attention-backend flash --params-dtype fp64",
        ("--attention-backend flash", "fp64", "--params-dtype bf16"),
    ),
    Wrong(
        "--device cuda --params-dtype fp32",
        ("--params-dtype fp32", "--device cuda", "use --params-dtype bf16", "--device cpu"),
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.flags or "nothing")
def test_refused(wrong: Wrong, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(wrong.ranks))
    with pytest.raises(SystemExit) as refused:
        load_run([*wrong.data.split(), *wrong.flags.split()])
    captured = capsys.readouterr()
    assert refused.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    for part in wrong.says:
        assert part in captured.err


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
    "lora_target_modules": "q_proj",
    "split": "98,2",
    "load_accept_changes": "seq_length",
}


OFF = {"position_embedding_type": "learned_absolute", "offload_alpha": "off", "recompute_granularity": "full"}
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
    ],
)
def test_accepted(flags: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    load_run(["--mock-data", *flags.split()])


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
    assert resolved_a2a_size(parse_run(flags.split(), prog="test")) == size


def test_derived_batch() -> None:
    config = parse_run(["--tp", "2", "--cp", "2", "--mbs", "2", "--gbs", "24"], prog="test")
    assert data_parallel_size(config, 16) == 4
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
    ],
)
def test_tiles_that_nobody_names(flags: str, tiles: int) -> None:
    """Eight, and where layers are swept as many as give a rank 32,768 tokens of each, or a little more."""
    assert resolved_offload_tiles(parse_run(flags.split(), prog="test")) == tiles


def test_derived_sizes() -> None:
    assert vocab_rows_per_rank(50257, 1) == 50304
    assert vocab_rows_per_rank(50257, 4) == 12608
    assert vocab_rows_per_rank(64, 2) == 64
    assert resolved_lr_wsd_decay_iters(RunConfig().override({"train_iters": 3})) == 1
    assert resolved_lr_wsd_decay_iters(RunConfig().override({"lr_decay_iters": 50})) == 5


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
