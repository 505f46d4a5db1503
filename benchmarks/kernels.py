"""Compares memo's kernels with torch's operations, torch.compile and, if it is installed, Liger.

    python benchmarks/kernels.py

A row is an operation that the model calls (memo_kernels.Ops), in bf16, on one tile of tokens of an 8B model. Forward
alone and forward with backward are timed, each as a median over a tenth of a second; backward is the difference. Bytes
are the least that must move: inputs are read once, results are written once. Ratios are the other kernel's time over
memo's. Two further rows are a gated delta net with each --delta-backend, with the measured and foreseen memory of a
backward. Without CUDA nothing is timed: each operation runs once in torch at a tiny size, which proves that the script
runs.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rows import Journal
from scales import Scale, arguments
from torch import Tensor

from memo.attention import delta_rule
from memo.attention.delta_kernels import choose_delta, select_delta
from memo.spec.delta import TAPS, fla_bytes, group_elements, group_tokens
from memo_kernels import Ops, select_ops

EPSILON = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Sizes of one tile of one rank; `vocab`: rows of the head on this rank, `flat`: gradients of one bucket."""

    tokens: int = 16384
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 14336
    loss_tokens: int = 8192
    vocab: int = 32768
    flat: int = 2**28


TINY = Sizes(tokens=8, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, loss_tokens=4, vocab=64, flat=128)

Run = Callable[[], object]


@dataclass(frozen=True)
class Way:
    """Functions that run forward, and forward with backward; None: not available."""

    forward: Run | None
    both: Run | None


@dataclass(frozen=True)
class Work:
    """An operation on given tensors.

    Attributes:
        shape: shape of the inputs, as text.
        of: makes the work with the operations of a library.
        liger: the work with Liger's kernels; None: Liger has none.
    """

    shape: str
    of: Callable[[Ops], Way]
    liger: Callable[[], Way] | None
    forward_bytes: int
    backward_bytes: int | None


class Maker:
    """Tensors of the benchmark on one device."""

    def __init__(self, device: str) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def autograd(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Way:
        leaves = [x.detach().requires_grad_() for x in inputs]

        def outputs() -> tuple[Tensor, ...]:
            found = function(*leaves)
            return found if isinstance(found, tuple) else (found,)

        grads = [self.normal(*out.shape, dtype=out.dtype) for out in outputs()]
        return Way(outputs, lambda: torch.autograd.grad(outputs(), leaves, grads))


def num_bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def shape(x: Tensor) -> str:
    return " x ".join(str(size) for size in x.shape if size > 1)


def norm(make: Maker, z: Sizes, *, centered: bool) -> Work:
    x, weight = make.normal(z.tokens, 1, z.hidden), make.normal(z.hidden)
    parameters = [weight, make.normal(z.hidden)] if centered else [weight]

    def liger() -> Way:
        from liger_kernel.transformers import functional as theirs

        if centered:
            return make.autograd(lambda x, w, b: theirs.liger_layer_norm(x, w, b, EPSILON), [x, *parameters])
        return make.autograd(lambda x, w: theirs.liger_rms_norm(x, w, EPSILON, in_place=False), [x, weight])

    def of(ops: Ops) -> Way:
        return make.autograd(lambda x, w, b=None: ops.norm(x, w, b, EPSILON), [x, *parameters])

    return Work(shape(x), of, liger, 2 * num_bytes(x), 3 * num_bytes(x))


def add_norm(make: Maker, z: Sizes) -> Work:
    x, residual, weight = make.normal(z.tokens, 1, z.hidden), make.normal(z.tokens, 1, z.hidden), make.normal(z.hidden)

    def liger() -> Way:
        from liger_kernel.transformers import functional as theirs

        def call(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
            return theirs.liger_fused_add_rms_norm(x, residual, weight, EPSILON, in_place=False)

        return make.autograd(call, [x, residual, weight])

    def of(ops: Ops) -> Way:
        return make.autograd(lambda x, r, w: ops.add_norm(x, r, w, None, EPSILON), [x, residual, weight])

    return Work(f"two {shape(x)}", of, liger, 4 * num_bytes(x), 4 * num_bytes(x))


def rope(make: Maker, z: Sizes) -> Work:
    """Return the rotation of q and k in place, as in the slot of a swap plan, and of their gradients back."""
    q, k = (make.normal(z.tokens, 1, heads, z.head_dim) for heads in (z.heads, z.kv_heads))
    angles = make.normal(z.tokens, 1, 1, z.head_dim // 2, dtype=torch.float32)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def turn(ops: Ops, back: bool) -> None:
        for heads in (q, k):
            ops.rotate_(heads, cos, sin, back=back)

    def both(ops: Ops) -> None:
        turn(ops, False)
        turn(ops, True)

    def of(ops: Ops) -> Way:
        return Way(lambda: turn(ops, False), lambda: both(ops))

    def liger() -> Way:
        from liger_kernel.transformers import functional as theirs

        whole = [torch.cat((angle, angle), dim=-1).view(1, z.tokens, z.head_dim) for angle in (cos, sin)]
        return make.autograd(lambda q, k: theirs.liger_rope(q, k, *whole), [x.permute(1, 2, 0, 3) for x in (q, k)])

    moved = 2 * num_bytes(q, k) + num_bytes(cos, sin)
    return Work(f"{shape(q)} and {shape(k)}", of, liger, moved, moved)


def activation(make: Maker, z: Sizes, *, kind: str) -> Work:
    gated = kind == "swiglu"
    inner = make.normal(z.tokens, 1, 2 * z.ffn if gated else z.ffn)
    in_bytes = num_bytes(inner)
    out_bytes = in_bytes // 2 if gated else in_bytes

    def liger() -> Way:
        from liger_kernel.transformers import functional as theirs

        return make.autograd(theirs.liger_swiglu, [half.contiguous() for half in inner.chunk(2, dim=-1)])

    def of(ops: Ops) -> Way:
        return make.autograd(lambda inner: ops.activate(inner, kind), [inner])

    return Work(shape(inner), of, liger if gated else None, in_bytes + out_bytes, 2 * in_bytes + out_bytes)


def cross_entropy(make: Maker, z: Sizes) -> Work:
    """Return the sums of the logits, and their gradient in place; Liger computes both at once."""
    logits, grad = make.normal(z.loss_tokens, z.vocab), torch.ones(z.loss_tokens, device=make.device)
    labels = torch.arange(z.loss_tokens, device=make.device) % z.vocab

    def both(ops: Ops) -> None:
        maximum, total, _, exponentials = ops.logit_sums(logits, labels, z.vocab, lambda maximum: maximum)
        ops.logit_gradient_(logits, exponentials, labels, maximum, total, grad, z.vocab)

    def of(ops: Ops) -> Way:
        return Way(lambda: ops.logit_sums(logits, labels, z.vocab, lambda maximum: maximum), lambda: both(ops))

    def liger() -> Way:
        from liger_kernel.transformers import functional as theirs

        way = make.autograd(lambda x: theirs.liger_cross_entropy(x, labels, reduction="none"), [logits])
        return Way(None, way.both)

    return Work(shape(logits), of, liger, num_bytes(logits), 2 * num_bytes(logits))


def merge(make: Maker, z: Sizes) -> Work:
    """Return the merge of one block of ring attention into the running sums."""
    sizes = (z.tokens, 1, z.heads, z.head_dim)
    total, out = (make.normal(*sizes, dtype=dtype).permute(1, 2, 0, 3) for dtype in (torch.float32, torch.bfloat16))
    total_lse, lse = (make.normal(1, z.heads, z.tokens, dtype=torch.float32) for _ in range(2))
    moved = 2 * num_bytes(total, total_lse) + num_bytes(out, lse)
    return Work(shape(out), lambda ops: Way(lambda: ops.merge_(total, total_lse, out, lse), None), None, moved, None)


def squared_norm(make: Maker, z: Sizes) -> Work:
    x = make.normal(z.flat, dtype=torch.float32)
    return Work(shape(x), lambda ops: Way(lambda: ops.squared_norm(x), None), None, num_bytes(x), None)


WORKS: dict[str, Callable[[Maker, Sizes], Work]] = {
    "RMSNorm": lambda make, z: norm(make, z, centered=False),
    "LayerNorm": lambda make, z: norm(make, z, centered=True),
    "sum and RMSNorm": add_norm,
    "RoPE in place": rope,
    "SwiGLU": lambda make, z: activation(make, z, kind="swiglu"),
    "GELU": lambda make, z: activation(make, z, kind="gelu_tanh"),
    "cross-entropy": cross_entropy,
    "merged attention": merge,
    "squared norm": squared_norm,
}


def compiled(ops: Ops) -> Ops:
    """Return each operation under torch.compile."""
    functions = {field.name: getattr(ops, field.name) for field in dataclasses.fields(ops) if field.name != "name"}
    return Ops("torch.compile", **{name: torch.compile(function) for name, function in functions.items()})


def seconds(run: Run | None) -> float | None:
    from triton.testing import do_bench

    return None if run is None else float(do_bench(run, return_mode="median")) / 1e3


def times(way: Way) -> dict[str, float | None]:
    return {"forward": seconds(way.forward), "both": seconds(way.both)}


def measured(work: Work) -> dict[str, Any]:
    """Return times and rates of memo's kernel on CUDA, and ratios of other kernels; failures go to the message."""
    torch_ops = select_ops("torch", torch.bfloat16)
    ours = times(work.of(select_ops("triton", torch.bfloat16)))
    row: dict[str, Any] = {"status": "ok", "forward_s": ours["forward"], "forward_bytes": work.forward_bytes}
    row["forward_gb_per_s"] = work.forward_bytes / ours["forward"] / 1e9
    if ours["both"] is not None:
        row["backward_s"], row["backward_bytes"] = ours["both"] - ours["forward"], work.backward_bytes
        row["backward_gb_per_s"] = work.backward_bytes / row["backward_s"] / 1e9
    others = {"torch": lambda: work.of(torch_ops), "compile": lambda: work.of(compiled(torch_ops))}
    if work.liger is not None and importlib.util.find_spec("liger_kernel") is not None:
        others["liger"] = work.liger
    problems = []
    for name, way in others.items():
        try:
            theirs = times(way())
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        row |= {f"{part}_over_{name}": theirs[part] / ours[part] for part in ours if ours[part] and theirs[part]}
    return row | ({"message": "; ".join(problems)} if problems else {})


def tried(work: Work) -> dict[str, Any]:
    way = work.of(select_ops("torch", torch.bfloat16))
    for run in (way.forward, way.both):
        if run is not None:
            run()
    return {"status": "not measured", "message": "kernels are timed on CUDA"}


def delta_net(name: str, make: Maker, z: Sizes) -> dict[str, Any]:
    """Return the row of a gated delta net on one sequence with the kernels `name`, with two value heads a key head."""
    heads, key_heads = z.heads, z.heads // 2
    channels = (heads + 2 * key_heads) * z.head_dim
    of = select_delta(name)(make.normal(channels, TAPS), make.normal(heads), make.normal(heads), z.head_dim)
    mixed, grad_out = make.normal(z.tokens, 1, channels + 2 * heads), make.normal(z.tokens, 1, heads * z.head_dim)
    carry, place = of.empty_carry(mixed), delta_rule.Place(None, 0)
    after, out = torch.empty_like(carry), torch.empty_like(grad_out)
    sums = (torch.zeros_like(x, dtype=carry.dtype) for x in of[:3])
    found = delta_rule.Gradients(torch.empty_like(mixed), torch.zeros_like(carry), *sums)

    def forward() -> None:
        delta_rule.forward(of, mixed, carry, place, out, after)

    def backward() -> None:
        found.carry.zero_()  # otherwise it would grow from run to run
        delta_rule.backward(of, grad_out, mixed, carry, place, found)

    forward()
    backward()
    row: dict[str, Any] = {"op": f"gated delta net, {name}", "shape": shape(mixed)}
    if make.device != "cuda":
        return {**row, "status": "not measured", "message": "kernels are timed on CUDA"}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    backward()
    group = min(z.tokens, group_tokens(heads, 1)) * heads
    of_fla, of_torch = (
        fla_bytes(z.head_dim, z.head_dim / 2, True),
        4 * group_elements(z.head_dim, 2 * z.head_dim, True, mixed=True),
    )
    row["backward_peak_bytes"] = torch.cuda.max_memory_allocated() - before
    row["foreseen_peak_bytes"] = int(group * (of_fla if name == "fla" else of_torch)) + 2 * carry.nbytes
    return {**row, "status": "ok", "forward_s": seconds(forward), "backward_s": seconds(backward)}


def add_delta_nets(journal: Journal, scale: Scale, sizes: Sizes) -> None:
    chosen = choose_delta("auto", scale.device, torch.bfloat16, sizes.head_dim)
    for name in ("torch", "fla"):
        about: dict[str, Any] = {"scale": scale.name, "op": f"gated delta net, {name}"}
        if name == "fla" and chosen.name != "fla":
            row: dict[str, Any] = {"status": "skipped", "message": chosen.reason}
        else:
            try:
                row = delta_net(name, Maker(scale.device), sizes)
            except Exception as error:
                row = {"status": "failed", "message": f"{type(error).__name__}: {error}".splitlines()[0]}
        journal.add({**about, **row})


def main() -> None:
    args = arguments(__doc__)
    on_cuda = args.scale.device == "cuda"
    sizes, journal = Sizes() if on_cuda else TINY, Journal(f"{args.scale.name}/kernels")
    for name, make in WORKS.items():
        about: dict[str, Any] = {"scale": args.scale.name, "op": name}
        if args.left_s <= 0:
            journal.add({**about, "status": "skipped", "message": "no time was left"})
            continue
        try:
            work = make(Maker(args.scale.device), sizes)
            about["shape"] = work.shape
            row = measured(work) if on_cuda else tried(work)
        except Exception as error:
            row = {"status": "failed", "message": f"{type(error).__name__}: {error}".splitlines()[0]}
        journal.add({**about, **row})
    if args.left_s > 0:
        add_delta_nets(journal, args.scale, sizes)


if __name__ == "__main__":
    main()
