"""flash-linear-attention's kernels under memo's gated delta net, against fp64: fla-core itself, in Triton's interpreter
where there is no GPU.

There the products of bf16 are not Triton's, which takes its bits for integers, so fp16 stands for it.
"""

import builtins
from collections.abc import Iterator
from importlib import import_module, util
from typing import Any

import pytest
import torch
from delta_nets import BATCH, CHANNELS, DOCUMENTS, HEADS, TOKENS, net, place, run
from kernel_checks import DEVICE
from torch import Tensor

from memo.attention.delta_kernels import FlaDeltaNet
from memo.attention.delta_rule import DeltaNet, Place
from memo.parallel.storages import LiveBytes
from memo.spec.delta import carry_size, fla_bytes, fla_document_bytes

for package, name in (("triton", "Triton"), ("fla", "fla-core")):
    if util.find_spec(package) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)

ON_GPU = DEVICE.type == "cuda"


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter lacks for these kernels: it has nothing to time variants of a kernel with, counts the rounds
    of a loop in numbers that are no tensors, and makes masks that are not of bool."""
    if ON_GPU:
        return
    language = import_module("triton.language")
    interpreter, autotuner = import_module("triton.runtime.interpreter"), import_module("triton.runtime.autotuner")

    def rounds(*bounds: Any) -> Iterator[Any]:
        plain = (int(each.handle.data.item()) if hasattr(each, "handle") else int(each) for each in bounds)
        return (language.full((), each, language.int32) for each in builtins.range(*plain))

    load = interpreter.InterpreterBuilder.create_masked_load

    def masked_load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(builder, pointers, mask, *others)

    monkeypatch.setattr(autotuner.Autotuner, "_bench", lambda *_, **__: [0.0] * 3)
    monkeypatch.setattr(import_module("fla.ops.common.chunk_delta_h"), "range", rounds, raising=False)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", masked_load)


def inputs(dtype: torch.dtype, rows: slice = slice(None)) -> tuple[list[Tensor], Tensor, Tensor]:
    """Parameters, `mixed` and the gradient of the output, in numbers that `dtype` has."""
    parameters = [x.to(DEVICE, dtype) for x in net()[:3]]
    shapes = ((TOKENS, BATCH, CHANNELS + 2 * HEADS), (TOKENS, BATCH, HEADS * 16))
    mixed, grad_out = (torch.randn(shape).to(DEVICE, dtype) for shape in shapes)
    return parameters, mixed[rows].clone(), grad_out[rows].clone()


def results(kind: type[DeltaNet], dtype: torch.dtype, where: Place, ends: tuple[int, ...]) -> list[Tensor]:
    parameters, mixed, grad_out = inputs(dtype)
    wide = torch.float64 if kind is DeltaNet and dtype == torch.float64 else dtype
    out, found = run(kind(*(x.to(wide) for x in parameters), 16), mixed, where, ends, grad_out)
    return [out, found.mixed, *found[2:]]


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [
        (torch.float16, 1e-3),
        (torch.float32, 5e-5),
        pytest.param(torch.bfloat16, 8e-3, marks=pytest.mark.skipif(not ON_GPU, reason="the interpreter lacks it")),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("documents", "ends"),
    [("one", (TOKENS,)), ("several", (72, TOKENS))],
    ids=["a sequence", "packed, in two tiles"],
)
def test_as_exact_as_torchs_rule(documents: str, ends: tuple[int, ...], dtype: torch.dtype, floor: float) -> None:
    """Output, gradients of the input and of all parameters: in norm at most twice as far from fp64 as torch's
    operations in the same dtype, or `floor`: a unit in its last place, and fp32's of TF32, in which fla multiplies."""
    where = Place(None, 0) if documents == "one" else place(DOCUMENTS[documents])
    parameters, mixed, grad_out = (x if isinstance(x, list) else x.double() for x in inputs(dtype))
    exact_out, exact = run(DeltaNet(*(x.double() for x in parameters), 16), mixed, where, ends, grad_out)
    ours, theirs = (results(kind, dtype, where, ends) for kind in (FlaDeltaNet, DeltaNet))
    for our, their, truth in zip(ours, theirs, (exact_out, exact.mixed, *exact[2:]), strict=True):
        assert distance(our, truth) <= max(2 * distance(their, truth), floor)


def test_other_documents_change_no_bit() -> None:
    """Outputs and gradients of a document where the tokens of the one before are others."""
    parameters, mixed, grad_out = inputs(torch.float16)
    grad_out[:70] = 0
    found = []
    for given in (mixed, torch.cat((-3 * mixed[:70], mixed[70:]))):
        out, gradients = run(FlaDeltaNet(*parameters, 16), given, place(((70, 80), (70, 80))), (TOKENS,), grad_out)
        found.append((out[70:], gradients.mixed[70:], *gradients[2:]))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.skipif(ON_GPU, reason="counted without kernels")
@pytest.mark.parametrize("documents", [1, 16])
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(8, 8, 16), (8, 4, 64), (8, 2, 64), (8, 4, 128)])
def test_the_account_of_memory(
    heads: int, key_heads: int, dim: int, documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one group asks for, in 16 bits: at most what is foreseen, and at least 0.94 of it, or 0.8 with the most
    documents. No kernel runs."""
    monkeypatch.setattr(import_module("triton.runtime.interpreter").GridExecutor, "__call__", lambda *_, **__: None)
    from memo.attention.delta_rule import Gradients, backward, forward

    tokens, half = 4096, {"dtype": torch.bfloat16}
    channels = (heads + 2 * key_heads) * dim
    of = FlaDeltaNet(torch.zeros(channels, 4, **half), torch.zeros(heads, **half), torch.zeros(heads, **half), dim)
    mixed, out = torch.zeros(tokens, 1, channels + 2 * heads, **half), torch.zeros(tokens, 1, heads * dim, **half)
    carry = of.empty_carry(mixed)
    found = Gradients(torch.zeros_like(mixed), *(torch.zeros_like(x, dtype=carry.dtype) for x in (carry, *of[:3])))
    after, ends = torch.empty_like(carry), (*range(0, tokens, tokens // documents), tokens)
    where = Place((ends,) if documents > 1 else None, 0)
    for is_backward in (False, True):
        with LiveBytes((*of[:3], mixed, out, carry, after, *found)) as live:
            if is_backward:
                backward(of, out, mixed, carry, where, found)
            else:
                forward(of, mixed, carry, where, out, after)
        foreseen = tokens * heads * fla_bytes(dim, dim * key_heads / heads, is_backward)
        foreseen += 2 * 4 * carry_size(heads, key_heads, dim)
        foreseen += fla_document_bytes(heads, dim, 1, is_backward) if documents > 1 else 0
        assert (0.8 if documents > 1 else 0.94) * foreseen <= live.peak <= foreseen, (is_backward, live.peak / foreseen)
