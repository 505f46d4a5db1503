"""A decoder layer of your own, which trains under every plan of memo (docs/custom_model.md).

A layer has two halves, before and after attention. Both are token-wise, so that memo can run them on tiles of tokens,
move a share of their activations and recompute the rest. A class defines the two halves as methods:

    class MyLayer(memo.CustomLayer):
        def __init__(self, parts): ...                      # matrices and norms, made by `parts`
        def before_attention(self, x): ...                  # [n, b, h] -> q, k and v side by side, [s, b, (a + 2k) d]
        def after_attention(self, x, attended): ...         # [n, b, h] and [s, b, a d] -> [n, b, h]

Shapes: n = s / tp tokens between matrices, s = tokens of this context-parallel rank inside them (of a tile, under a
swap plan); b = micro-batch; h = hidden size; a, k = query and key/value heads of this tp rank; d = size of a head.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memo.config.model import ModelConfig
from memo.errors import ConfigError
from memo.model.heads import Heads
from memo.model.layer import TransformerLayer
from memo.model.norm import Norm
from memo.model.parts import LayerContext, ModelParts
from memo.model.rope import RopeTable
from memo.parallel.shards import ShardedParameter
from memo.parallel.storages import LiveBytes
from memo.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from memo.spec.custom_layer import Half, LayerFacts, TokenBytes, custom_facts, load_layer
from memo.spec.weights import Init, Weight, one
from memo_kernels import select_ops, wide_dtype

_TAKEN = ("input", "qkv", "heads", "attention_out", "lse", "layer_output")
"""Names of values that a matrix must not have (memo.program.kinds)."""
_PROBE_TOKENS = (64, 128)
"""Bytes are counted for both numbers, to separate bytes that grow with the tokens from bytes that do not."""
_PROBE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class LayerParts:
    """Makes the parameters of one layer, split over tp, and records them.

    Names are those of the layer's attributes, such as "fc1"; each may be used once.

    Attributes:
        model: the ModelConfig of the run.
        index: the layer's index, from 0.
    """

    def __init__(self, parts: ModelParts, index: int) -> None:
        self.shared, self.model, self.index = parts, parts.config, index
        self._prefix = f"layers.{index}."
        self.made: list[tuple[Weight, ShardedParameter]] = []

    def column(
        self, name: str, outputs: int | Mapping[str, int], inputs: int | None = None, *, bias: bool = False
    ) -> ColumnParallelLinear:
        """A matrix that tp splits by its outputs: [n, b, inputs] -> [s, b, outputs / tp]; it gathers the tokens.

        Args:
            outputs: number of outputs; or {name: number} for several matrices with one input, whose outputs lie side
                by side, each split by itself.
            inputs: number of inputs; default: the hidden size.
        """
        parts = {name: outputs} if isinstance(outputs, int) else {f"{name}.{key}": n for key, n in outputs.items()}
        columns = self.model.hidden_size if inputs is None else inputs

        def rows(kind: str) -> tuple[tuple[str, int], ...]:
            return tuple((f"{part}.{kind}", number) for part, number in parts.items())

        weight = self._make(Weight(f"{name}.weight", rows("weight"), columns, "rows"))
        added = self._make(Weight(f"{name}.bias", rows("bias"), None, "rows", "zeros")) if bias else None
        return ColumnParallelLinear(weight, added, self.shared.tp_group)

    def row(self, name: str, inputs: int, outputs: int | None = None, *, bias: bool = False) -> RowParallelLinear:
        """A matrix that tp splits by its inputs: [s, b, inputs / tp] -> [n, b, outputs]; it sums over tp and scatters
        the tokens. `outputs`: number of outputs; default: the hidden size."""
        rows = self.model.hidden_size if outputs is None else outputs
        weight = self._make(one(f"{name}.weight", rows, inputs, "columns"))
        added = self._make(one(f"{name}.bias", rows, init="zeros")) if bias else None
        return RowParallelLinear(weight, added, self.shared.tp_group)

    def norm(self, name: str, size: int | None = None) -> Norm:
        """The norm that --normalization names, over a last dim of `size` (default: the hidden size)."""
        size = self.model.hidden_size if size is None else size
        weight = self._make(one(f"{name}.weight", size, init="ones"))
        with_bias = self.model.normalization == "LayerNorm"
        return self.shared.norm(weight, self._make(one(f"{name}.bias", size, init="zeros")) if with_bias else None)

    def vector(self, name: str, size: int | None = None, init: Init = "ones") -> nn.Parameter:
        """A vector that every tp rank has whole, such as a gain; `size`: default: the hidden size."""
        return self._make(one(name, self.model.hidden_size if size is None else size, init=init))

    def activate(self, inner: Tensor) -> Tensor:
        """Apply --activation to [s, b, f / tp]; a gated activation takes gate and up side by side, [s, b, 2 f / tp]."""
        return self.shared.ops.activate(inner, self.model.activation)

    def _make(self, weight: Weight) -> ShardedParameter:
        if any(weight.name == made.name for made, _ in self.made):
            raise ConfigError(
                f"--custom-layer {self.model.custom_layer} makes {weight.name} twice: give each matrix, norm and "
                "vector a name of its own"
            )
        parameter = self.shared.parameter(weight, self._prefix)
        self.made.append((weight, parameter))
        return parameter


class CustomLayer(nn.Module):
    """The base of a layer of your own. Both methods must be deterministic and token-wise: no token may see another.

    Attributes:
        recalled: paths of the matrices after attention whose outputs may move, in part, to host memory.
    """

    recalled: tuple[str, ...] = ()

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        self.attention = Heads(parts.shared, parts.index)

    def before_attention(self, x: Tensor) -> Tensor:
        """From the layer's input [n, b, h] to q, k and v side by side, [s, b, (a + 2k) d]; memo rotates q and k."""
        raise NotImplementedError

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """From the layer's input [n, b, h] and attention's output [s, b, a d] to the layer's output [n, b, h]."""
        raise NotImplementedError

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        return self.after_attention(x, self.attention.attend(self.before_attention(x), context))

    @classmethod
    def facts(cls, model: ModelConfig) -> LayerFacts:
        """The facts that planning needs, found by running both halves once on shapes alone, without tp.

        Raises ConfigError if memo cannot run the layer, and says why.
        """
        weights, recalled = _declared(cls, model)
        halves = {}
        for dtype in _PROBE_DTYPES:
            halves[dtype.itemsize, False] = _bytes(cls, model, dtype)
            with _NormsOfGpus():
                halves[dtype.itemsize, True] = _bytes(cls, model, dtype)
        return LayerFacts(weights, recalled, tuple(halves.items()))


def make_layer(parts: ModelParts, index: int) -> TransformerLayer | CustomLayer:
    """Make layer `index` of the model: memo's own, or that of --custom-layer."""
    if not parts.config.custom_layer:
        return TransformerLayer(parts, index)
    layer: CustomLayer = load_layer(parts.config.custom_layer)(LayerParts(parts, index))
    layer.recalled = tuple(name for name, _ in custom_facts(parts.config).recalled)
    return layer


# The functions that find a layer's facts.


class _Probe:
    """One layer on the device "meta", where tensors have shapes but no data."""

    def __init__(self, cls: type[CustomLayer], model: ModelConfig, dtype: torch.dtype, index: int = 0) -> None:
        self.model, self.dtype = model, dtype
        parts = ModelParts(model, dtype, None, lambda _: _no_attention, select_ops("torch", dtype))
        self.parts = LayerParts(parts, index)
        try:
            self.layer = cls(self.parts)
        except TypeError as error:
            remedy = "its __init__ takes `parts` alone and calls super().__init__(parts)"
            raise _error(model, f"cannot be made ({error})", remedy) from error
        declared = {id(parameter) for _, parameter in self.parts.made}
        for name, parameter in self.layer.named_parameters():
            parameter.register_post_accumulate_grad_hook(_forget_gradient)  # as in training, where it is added at once
            if id(parameter) not in declared:
                what = f"has a parameter {name} that parts did not make, so that nobody knows how tp splits it"
                raise _error(model, what, "make it by parts.column, parts.row, parts.norm or parts.vector")

    @property
    def qkv_width(self) -> int:
        return (self.model.num_attention_heads + 2 * self.model.kv_heads) * self.model.head_dim

    def tensor(self, num_tokens: int, width: int) -> Tensor:
        return torch.empty(num_tokens, 1, width, dtype=self.dtype, device="meta", requires_grad=True)

    def first(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return rotated q, k and v, and the output of before_attention, of which they may be views."""
        qkv = self.checked("before_attention", self.layer.before_attention(x), (*x.shape[:2], self.qkv_width))
        half = torch.empty(x.shape[0], 1, 1, self.model.head_dim // 2, dtype=self.dtype, device="meta")
        rope = RopeTable(half, half) if self.model.position_embedding_type == "rope" else None
        return (*self.layer.attention.prepare(qkv, rope), qkv)

    def second(self, x: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        return (self.checked("after_attention", self.layer.after_attention(x, attended), tuple(x.shape)),)

    def checked(self, method: str, found: Tensor, wanted: tuple[int, ...]) -> Tensor:
        if not isinstance(found, Tensor) or tuple(found.shape) != wanted:
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise _error(self.model, f"returns {got} from {method}", f"return a tensor {list(wanted)}")
        return found


def _declared(cls: type[CustomLayer], model: ModelConfig) -> tuple[tuple[Weight, ...], tuple[tuple[str, int], ...]]:
    """Return the table of parameters in the order of the layer's modules, and the matrices whose outputs may move."""
    probe = _Probe(cls, model, torch.float32)
    by_id = {id(parameter): weight for weight, parameter in probe.parts.made}
    parameters = list(probe.layer.parameters())
    weights = tuple(by_id[id(parameter)] for parameter in parameters)
    made = [weight for weight, _ in probe.parts.made]
    for index in range(1, model.num_layers):
        if [weight for weight, _ in _Probe(cls, model, torch.float32, index).parts.made] != made:
            what = f"makes other parameters for layer {index} than for layer 0"
            raise _error(model, what, "make the same for each parts.index")
    calls: Counter[str] = Counter()
    widths = {}
    for name, module in probe.layer.named_modules():
        if isinstance(module, ColumnParallelLinear):
            widths[name] = module.weight.shape[0]
            module.register_forward_hook(lambda *_, called=name: calls.update([called]))
    x, attended = probe.tensor(8, model.hidden_size), probe.tensor(8, model.num_attention_heads * model.head_dim)
    with torch.enable_grad():
        first = probe.first(x)
        calls.clear()
        outputs = [out for out in (*first, *probe.second(x, attended)) if out.requires_grad]
        found = torch.autograd.grad(outputs, parameters, list(map(torch.empty_like, outputs)), allow_unused=True)
    for weight, gradient in zip(weights, found, strict=True):
        if gradient is None:
            raise _error(model, f"makes {weight.name} and does not use it", "use it in every forward, or leave it out")
    recalled = tuple((name, width) for name, width in widths.items() if calls[name] == 1)
    for name, _ in recalled:
        if name in _TAKEN:
            raise _error(model, f"calls a matrix after attention {name}, a name that memo uses", "rename it")
    return weights, recalled


def _bytes(cls: type[CustomLayer], model: ModelConfig, dtype: torch.dtype) -> tuple[Half, Half]:
    """Count the bytes of both halves in one dtype, without the memory of parameters."""
    probe = _Probe(cls, model, dtype)
    widths = (model.hidden_size, model.num_attention_heads * model.head_dim)
    first = [_measured(probe, probe.first, [probe.tensor(n, widths[0])], keeps_output=True) for n in _PROBE_TOKENS]
    second = [
        _measured(probe, probe.second, [probe.tensor(n, w) for w in widths], keeps_output=False) for n in _PROBE_TOKENS
    ]
    return _lines(*first), _lines(*second)


def _measured(
    probe: _Probe, half: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], keeps_output: bool
) -> tuple[int, int, int, int]:
    """Return bytes for one number of tokens, in the order of the fields of Half."""
    parameters = list(probe.layer.parameters())
    with LiveBytes([*inputs, *parameters]) as live, torch.enable_grad():
        outputs = half(*inputs)
        forward, made = live.peak, live.made
        outputs = outputs if keeps_output else tuple(output.view_as(output) for output in outputs)
        kept = live.now - (0 if keeps_output else sum(output.nbytes for output in outputs))
        grads = [torch.empty_like(output) for output in outputs]
        live.restart()
        before = live.now
        torch.autograd.backward(outputs, grads)
        return kept, forward, live.peak - before, made


class _NormsOfGpus(TorchFunctionMode):
    """Makes RMSNorm allocate what torch's kernel for GPUs does; elsewhere torch composes it of many operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_norm = func in (torch.rms_norm, nn.functional.rms_norm)
        return (_rms_norm if is_norm else func)(*args, **(kwargs or {}))


def _rms_norm(
    input: Tensor, normalized_shape: object, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    y: Tensor = _RmsNorm.apply(input, weight)
    return y


class _RmsNorm(torch.autograd.Function):
    """The allocations of the kernel, which keeps its input and a statistic of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _lines(few: tuple[int, int, int, int], many: tuple[int, int, int, int]) -> Half:
    fewer, more = _PROBE_TOKENS
    slopes = [(high - low) / (more - fewer) for low, high in zip(few, many, strict=True)]
    return Half(*(TokenBytes(slope, low - slope * fewer) for slope, low in zip(slopes, few, strict=True)))


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _no_attention(*_: object) -> Tensor:
    raise AssertionError("the halves of a layer are run without attention")


def _error(model: ModelConfig, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"--custom-layer {model.custom_layer} {problem}: {remedy}")
