"""Moments of AdamW in bf16: the bits, the error, and what a checkpoint makes of another dtype."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents
from layouts import make, tiny
from ranks import run_ranks
from torch import Tensor
from trainers import tiny_trainer

from memo.checkpoint.directory import latest_checkpoint
from memo.config import TrainingConfig
from memo.config.checks import _LEAST_DECAY_IN_BF16
from memo.parallel.units import moment_dtypes
from memo.train import adamw
from memo.train.adamw import AdamW, MomentDtypes
from memo_kernels.squared_norm.reference import squared_norm

torch.set_num_threads(1)

KINDS = ("exp_avg", "exp_avg_sq")
BETAS, EPS = (0.9, 0.95), 1e-8
NARROW: dict[str, Any] = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
UNIT = torch.finfo(torch.bfloat16).eps / 2
"""The largest relative error of rounding to bf16."""


def parameters(*sizes: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def give_gradients(to: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in to:
        parameter.grad = torch.randn(parameter.shape, generator=generator).add_(0.5).to(parameter.dtype)


def round_to(optimizer: torch.optim.Optimizer, dtypes: MomentDtypes) -> None:
    for state in optimizer.state.values():
        for kind, dtype in zip(KINDS, dtypes, strict=True):
            state[kind].copy_(state[kind].to(dtype or torch.float32))


@pytest.mark.parametrize("piece", [64, adamw.PIECE])
@pytest.mark.parametrize(
    "dtypes",
    [(None, None), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["none", "both", "second", "first"],
)
def test_the_bits_are_torchs_with_moments_rounded_after_each_step(
    dtypes: MomentDtypes, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pieces are; the first step, whose moments were 0, moves weights as if nothing were rounded. The
    third of five steps is told of an overflow, and changes nothing. The last parameter has no gradient."""
    monkeypatch.setattr(adamw, "PIECE", piece)
    ours, theirs = parameters(1000, 7, 300, 3), parameters(1000, 7, 300, 3)
    groups = [[{"params": p[:1], "weight_decay": 0.3}, {"params": p[1:], "weight_decay": 0.0}] for p in (ours, theirs)]
    adam = AdamW(groups[0], lr=1e-2, betas=BETAS, eps=EPS, moments=dtypes)
    reference = torch.optim.AdamW(groups[1], lr=1e-2, betas=BETAS, eps=EPS, fused=True)
    for step in range(5):
        for optimizer, weights in ((adam, ours), (reference, theirs)):
            give_gradients(weights[:3], step)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            optimizer.found_inf = torch.ones(()) if step == 2 else None  # type: ignore[union-attr]
            optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), step
        unrounded = [reference.state[p][kind].clone() for p in theirs[:3] for kind in KINDS]
        round_to(reference, dtypes)
        rounded = [reference.state[p][kind] for p in theirs[:3] for kind in KINDS]
        assert step == 2 or all(map(torch.equal, unrounded, rounded)) is (dtypes == (None, None))
    assert ours[3] not in adam.state
    for mine, other in zip(ours[:3], theirs, strict=False):
        assert adam.state[mine]["step"] == reference.state[other]["step"] == 4
        for kind, dtype in zip(KINDS, dtypes, strict=True):
            assert adam.state[mine][kind].dtype == (dtype or torch.float32)
            assert torch.equal(adam.state[mine][kind].float(), reference.state[other][kind])


def test_moments_err_by_roundings_that_decay_and_weights_by_a_hundredth_of_their_way() -> None:
    """Against AdamW in fp64 over 50 steps. A step rounds a moment once, and what it adds to the error decays as the
    moment does, so the error stays below UNIT / (1 - beta) of the largest value that the moment had."""
    ours, exact = parameters(4096), [torch.nn.Parameter(p.detach().double()) for p in parameters(4096)]
    narrow = torch.bfloat16, torch.bfloat16
    adams = [
        AdamW([{"params": weights, "weight_decay": 0.0}], 1e-3, BETAS, EPS, dtypes)
        for weights, dtypes in ((ours, narrow), (exact, (None, None)))
    ]
    largest = [torch.zeros(4096, dtype=torch.float64) for _ in KINDS]
    for step in range(50):
        for adam, weights in zip(adams, (ours, exact), strict=True):
            give_gradients(weights, step)
            adam.step()
        for kind, beta, most in zip(KINDS, BETAS, largest, strict=True):
            moment, true = adams[0].state[ours[0]][kind].double(), adams[1].state[exact[0]][kind]
            torch.maximum(most, torch.maximum(true.abs(), moment.abs()), out=most)
            error = (moment - true).abs()
            assert error.max() > 0 and (error <= 1.01 * UNIT / (1 - beta) * most).all(), (kind, step)
    assert (ours[0] - exact[0]).abs().max() <= 0.01 * 50 * 1e-3


def test_from_the_least_decay_on_every_number_in_bf16_decays() -> None:
    """Below it some do not, and none does with Megatron-LM's default of --adam-beta2."""
    numbers = torch.arange(128, 256).div(128)
    assert torch.equal(numbers.bfloat16().float(), numbers) and numbers[1] == 1 + torch.finfo(torch.bfloat16).eps

    def stays(decay: float) -> Tensor:
        return numbers.mul(1 - decay).bfloat16().float() == numbers

    assert not stays(_LEAST_DECAY_IN_BF16).any()
    assert stays(0.98 * _LEAST_DECAY_IN_BF16).any() and stays(0.001).all()


@pytest.mark.parametrize("narrow", [NARROW, {"exp_avg_dtype": "bf16"}])
def test_an_update_takes_no_more_memory_than_the_norm_before_it(narrow: dict[str, Any]) -> None:
    """4 bytes a narrow moment of each element of the largest parameter, or of a piece of it: no more than the norm."""
    taken = run_ranks(1, _scratch, TrainingConfig(**narrow))[0]
    assert [update for update, _ in taken] == [4 * len(narrow) * size for size in (1000, adamw.PIECE)]
    assert all(update <= norm for update, norm in taken)


def _scratch(training: TrainingConfig) -> list[tuple[int, int]]:
    """Bytes that the second step takes at most, and those of the norm of its largest gradient."""
    from allocated_bytes import AllocatedBytes

    counter, taken = AllocatedBytes(), []
    for sizes in ((1000, 7), (5, 3 << 20)):
        weights = parameters(*sizes)
        groups = [{"params": weights, "weight_decay": 0.1}]
        adam = AdamW(groups, 1e-3, BETAS, EPS, moment_dtypes(training, torch.bfloat16))
        for _ in range(2):  # the first makes the moments
            give_gradients(weights, 0)
            counter.take_peak_bytes()
            before = counter.live_bytes
            adam.step()
            update = counter.take_peak_bytes() - before
        assert weights[1].grad is not None and weights[0].grad is not None
        largest = max(weights[0].grad, weights[1].grad, key=Tensor.numel)
        before = counter.live_bytes
        squared_norm(largest)
        taken.append((int(update), int(counter.take_peak_bytes() - before)))
    return taken


@pytest.mark.parametrize("states", [{}, {"offload_states": "all"}])
def test_a_rehearsed_step_changes_no_moment(states: dict[str, Any]) -> None:
    model, feed = make(tiny("llama-tiny", "bf16", num_layers=2, **NARROW, **states), 1)
    model.train_step(feed.next_global_batch(), lr=1e-2)

    def held() -> list[Tensor]:
        found = [kinds for _, kinds in model.optimizer.segment_states()]
        steps = [part.state(segment)["step"] for part in model.optimizer.parts for segment in part.segments]
        return [*(value.clone() for kinds in found for value in kinds.values()), *(step.clone() for step in steps)]

    before = held()
    assert {value.dtype for value in before} == {torch.bfloat16, torch.float32}
    with model.optimizer.rehearsing():
        model.train_step(feed.next_global_batch(), lr=1e-2)
    assert all(map(torch.equal, before, held()))
    model.train_step(feed.next_global_batch(), lr=1e-2)
    assert not any(map(torch.equal, before, held()))


def _runs(folder: Path) -> None:
    """Two steps with moments in fp32; then one with moments in bf16 from there, and one in fp32 from that."""
    sizes = {"num_layers": 2, "lr_decay_iters": 9, "lr_warmup_iters": 0}
    for part, (iters, dtypes) in enumerate([(2, {}), (2, NARROW), (3, NARROW), (3, {})]):
        load = {"load": str(folder / f"{part - 1}")} if part else {}
        with tiny_trainer(**sizes, train_iters=iters, save=str(folder / f"{part}"), **load, **dtypes) as trainer:
            trainer.train()
            trainer.save()


def test_a_checkpoint_loads_into_moments_of_another_dtype_which_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From fp32 they are rounded to the nearest, from bf16 they keep their values; masters keep every bit."""
    _runs(tmp_path)
    wide, rounded, went_on, back = (contents(latest_checkpoint(tmp_path / f"{part}"))[1] for part in range(4))
    for name, value in wide.items():
        is_moment = not name.startswith("master/")
        assert rounded[name].dtype == (torch.bfloat16 if is_moment else torch.float32)
        assert torch.equal(rounded[name], value.to(rounded[name].dtype)), name
        assert not torch.equal(went_on[name], rounded[name])
        assert torch.equal(back[name], went_on[name].float()) and back[name].dtype == torch.float32
    told = [line for line in capsys.readouterr().out.splitlines() if "loaded checkpoint" in line]
    flags = "; --exp-avg-dtype {0} from here on, it was {1}; --exp-avg-sq-dtype {0} from here on, it was {1}"
    assert [line.partition(";")[1:] for line in told] == [
        (";", flags.format("bf16", "fp32")[1:]),
        ("", ""),
        (";", flags.format("fp32", "bf16")[1:]),
    ]
