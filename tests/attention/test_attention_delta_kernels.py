"""Which kernels compute gated delta nets, and what memo puts around flash-linear-attention's: a stand-in of these
(tests/support/fla_stand_in.py) against one token after the other, in fp64, to 1e-13 of the largest.

tests/kernels/test_kernels_delta.py calls the package itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata, util
from typing import Any

import fla_stand_in
import pytest
import torch
from delta_nets import BATCH, CHANNELS, DIM, DOCUMENTS, HEADS, TOKENS, expected, net, place, run
from layouts import tiny, train_here
from swapped_steps import profiled_once

from memo.attention import delta_kernels
from memo.attention.backends import CpuFlash
from memo.attention.delta_kernels import FlaDeltaNet, choose_delta, select_delta
from memo.attention.delta_rule import DeltaNet, Place
from memo.attention.select import AttentionChoice
from memo.errors import ConfigError
from memo.parallel.context import ContextAttention
from memo.parallel.context_delta import ContextDelta
from memo.parallel.storages import LiveBytes
from memo.train import build

BOUND = 1e-13
BF16 = torch.bfloat16


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_kernels, "_fla", lambda: (fla_stand_in.convolve, fla_stand_in.compute))


@pytest.mark.parametrize(("group", "most"), [(128, 16), (512, 16), (512, 3)])
@pytest.mark.parametrize("ends", [(150,), (40, 72, 132, 150), (2, 71, 150)], ids=str)
@pytest.mark.parametrize("documents", [None, *DOCUMENTS])
def test_what_is_put_around_fla(
    documents: str | None,
    ends: tuple[int, ...],
    group: int,
    most: int,
    stand_in: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta_kernels, "group_tokens", lambda heads, batch: group)
    monkeypatch.setattr(delta_kernels, "FLA_DOCUMENTS", most)
    wanted = expected(documents or "one")
    where = Place(None, 0) if documents is None else place(DOCUMENTS[documents])
    assert wanted.is_found(*run(net(FlaDeltaNet), wanted.mixed, where, ends, wanted.grad_out), BOUND)


def test_a_call_has_few_documents() -> None:
    of, mixed = net(FlaDeltaNet), torch.zeros(4096, 1, CHANNELS + 2 * HEADS)
    bounds = (0, *range(100, 4096, 10), 4096)
    groups = of.groups(mixed, Place((bounds,), 0))
    assert [rows.start for rows, _ in groups] == [0, *(rows.stop for rows, _ in groups[:-1])]
    assert groups[-1][0].stop == 4096
    counts = [packed.counts[0] for _, packed in groups]
    assert max(counts) == 16
    assert sum(counts) == len(bounds) - 1


def test_a_run_gives_the_same_bits_at_any_alpha(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed documents, which cross tiles; losses of torch's rule to 1e-12."""
    way: dict[str, Any] = {"num_layers": 4, "global_batch_size": 2, "micro_batch_size": 2}
    swept = {"offload_tiles": 4, "offload_granularity": "tile", "offload_slot_tiles": 1}
    with profiled_once():
        by_torch = train_here(tiny("qwen3.5-tiny", **way), 1, 1)
        monkeypatch.setattr(build, "select_delta", lambda name: FlaDeltaNet)
        first, *others = (
            train_here(tiny("qwen3.5-tiny", **way, **swept, offload_alpha=alpha), 1, 1) for alpha in (0.0, 0.5, 1.0)
        )
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(other.gradients[name], gradient) for name, gradient in first.gradients.items())
    assert first.losses == pytest.approx(by_torch.losses, rel=1e-12, abs=0)


def test_all_that_depends_on_documents_is_given_back(stand_in: None) -> None:
    """As a plan of memory has it, where documents end anywhere; the boundaries themselves are kept."""
    of, within = net(FlaDeltaNet), list[tuple[int, int]]()

    @contextmanager
    def around() -> Iterator[None]:
        before = live.now
        live.restart()
        yield
        within.append((live.now - before, live.peak - before))

    core = ContextAttention(CpuFlash(), TOKENS, "a2a", None, None, 1.0, around=around)
    delta = ContextDelta(core, lambda: of)
    documents, mixed = place(DOCUMENTS["several"]).documents, torch.randn(TOKENS, BATCH, CHANNELS + 2 * HEADS).double()
    out = torch.empty(TOKENS, BATCH, HEADS * DIM, dtype=mixed.dtype)
    of.groups(mixed, Place(documents, 0))
    with LiveBytes((mixed, out)) as live:
        carry = delta.forward(mixed, out, documents)
        gradients = delta.backward(out, mixed, torch.zeros_like, documents, grad_carry=carry)
    assert len(gradients) == len(within) == 2
    assert [kept for kept, _ in within] == [0, 0]
    assert all(peak > 0 for _, peak in within)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Versions of packages; without tilelang."""
    packages = {"fla-core": "0.6.0", "triton": "3.9.0+git12"}

    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(util, "find_spec", packages.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    yield packages
    torch.use_deterministic_algorithms(False)


def choose(name: str = "auto", dtype: torch.dtype = BF16, head_dim: int = 128) -> AttentionChoice:
    return choose_delta(name, "cuda", dtype, head_dim)


def test_fla_is_taken_where_it_can_run(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose() == AttentionChoice("fla", "fla-core is installed")
    assert choose("fla") == AttentionChoice("fla", "--delta-backend")
    assert choose("torch") == AttentionChoice("torch", "--delta-backend")
    assert choose_delta("auto", "cpu", BF16, 128) == AttentionChoice("torch", "the one rule of this device")
    installed["triton"], installed["tilelang"] = "3.6.0", "0.1.9"
    assert choose().name == "fla"
    del installed["tilelang"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert choose().name == "fla"


@pytest.mark.parametrize(
    ("packages", "dtype", "head_dim", "deterministic", "problem"),
    [
        ({}, torch.float32, 128, False, "--params-dtype is float32: use bf16"),
        ({}, BF16, 320, False, "heads are of 320: it takes multiples of 8 up to 256"),
        ({}, BF16, 20, False, "heads are of 20: it takes multiples of 8 up to 256"),
        ({}, BF16, 128, True, "--deterministic is on, and it chooses kernels by their speed at each start"),
        ({"fla-core": None}, BF16, 128, False, r"fla-core is not installed: pip install 'memo-train\[fla\]' gives 0.6"),
        ({"fla-core": "0.5.2"}, BF16, 128, False, "fla-core is version 0.5.2: pip install"),
        ({"triton": None}, BF16, 128, False, "Triton is not installed: pip install triton"),
        ({"triton": "3.6.0"}, BF16, 128, False, r"it refuses Triton 3.6.0 on GPUs .* install Triton 3.7.1 or later"),
    ],
)
def test_why_fla_is_not_taken(
    installed: dict[str, str],
    packages: dict[str, str | None],
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool,
    problem: str,
) -> None:
    for name, version in packages.items():
        installed.pop(name)
        if version is not None:
            installed[name] = version
    torch.use_deterministic_algorithms(deterministic)
    chosen = choose(dtype=dtype, head_dim=head_dim)
    assert chosen.name == "torch"
    with pytest.raises(ConfigError, match=f"^--delta-backend is 'fla', but {problem}.*; or use --delta-backend auto$"):
        choose("fla", dtype, head_dim)


def test_fla_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="but the device is 'cpu': use --device cuda"):
        choose_delta("fla", "cpu", BF16, 128)


def test_the_package_is_not_asked_for_by_torchs_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_kernels, "_fla", lambda: pytest.fail("imported"))
    assert select_delta("torch") is select_delta("auto") is DeltaNet
