"""The operations that layers consist of: the values that each reads and makes, and those that its backward needs.

Values have names. An operation's attributes hold all that a walk (memo.program.walk) must know. The machines that run
an operation know what it computes, which memory it requests and what it costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from memo.spec.skeleton import Layout


@dataclass(frozen=True, eq=False)
class Operation:
    """Attributes:
    reads, makes: names of values.
    module: path, within a layer, of the module that has its weights.
    frozen: whether neither its matrices nor their adapters are trained, so that its backward needs no input.
    token_wise: whether it can run on any range of tokens independently.
    layout: the dim of its output that tp splits: "tokens", "heads" (the width), or "whole" (not split).
    gathers: whether it needs all tokens of its input, which tp ranks share.
    scatters: whether its results are summed over tp ranks, each of which keeps the sums of its tokens.
    replays: whether its backward runs its forward again, under a graph of its own, whatever is kept.
    writes_to_slot: whether it writes its output straight to the slot.
    is_sum: whether the gradient of its output is also the gradient of each of its inputs.
    takes_sums: whether one kernel can compute the sum just before it together with it.
    recalled: outputs that are always kept; recomputation and backward read them instead of making them again.
    reads_without_gradient: values that it reads, and that get no gradient.
    """

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    module: str = ""
    frozen: bool = field(default=False, kw_only=True)

    token_wise: ClassVar[bool] = True
    layout: ClassVar[Layout] = "heads"
    gathers: ClassVar[bool] = False
    scatters: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    writes_to_slot: ClassVar[bool] = False
    is_sum: ClassVar[bool] = False
    takes_sums: ClassVar[bool] = False
    recalled: ClassVar[tuple[str, ...]] = ()
    reads_without_gradient: ClassVar[tuple[str, ...]] = ()

    def layout_of(self, name: str) -> Layout:
        """The dim that tp splits of one of its outputs."""
        return self.layout

    @property
    def needs(self) -> tuple[str, ...]:
        """The values that its backward reads; an operation that replays has them in its graph."""
        return () if self.replays or self.is_sum or self.frozen else self.reads


_Entry = TypeVar("_Entry")


def entry_for(operation: Operation, table: Mapping[type[Any], _Entry]) -> _Entry:
    """The table's entry for the operation's class, or for the nearest class from which that derives."""
    kind: Any = type(operation)
    while kind not in table:
        kind = kind.__base__
    return table[kind]


class Norm(Operation):
    """LayerNorm or RMSNorm over the width."""

    layout: ClassVar[Layout] = "tokens"
    replays = takes_sums = True


class Add(Operation):
    """The sum of two values."""

    layout = "tokens"
    is_sum = True


class Scale(Operation):
    """A value times the layer's scalar, which is not trained."""

    layout = "tokens"

    @property
    def needs(self) -> tuple[str, ...]:
        return ()


class Column(Operation):
    """A column-parallel matrix: gathers the tokens of its input; its outputs are split over tp."""

    gathers = writes_to_slot = True


class Row(Operation):
    """A row-parallel matrix: its inputs are split over tp; a reduce-scatter leaves each rank its own tokens."""

    layout = "tokens"
    scatters = True


class Activate(Operation):
    """The activation of an MLP; in a gated MLP its input holds gate and up."""

    replays = True


class WholeColumn(Column):
    """A matrix with few outputs: each tp rank has all of them, and a part of their gradients."""

    layout = "whole"


class LatentNorm(Norm):
    """The norms of the latents of multi-latent attention, of all tokens on every tp rank."""

    layout: ClassVar[Layout] = "whole"
    takes_sums = False


class Expand(Operation):
    """Queries, keys and values side by side, from normed latents; queries without a latent are read beside these.

    `module` is the attention, whose matrices q and kv it multiplies.
    """

    writes_to_slot = True

    @property
    def needs(self) -> tuple[str, ...]:
        return self.reads[:1]


class Trim(Operation):
    """The channels of attention's output that heads of values have."""

    replays = True


class ActivateScored(Activate):
    """The activation of an MLP, times the sigmoid of a token's score."""


class ExpertColumn(Column):
    """The router, and the first matrix of the experts that it chooses for each token (memo.parallel.experts).

    Where the router has an input of its own, it reads this second. Experts are chosen once, in forward: recomputed
    scores might round differently and choose others.
    """

    recalled = ("routing",)

    def layout_of(self, name: str) -> Layout:
        return "whole" if name == "routing" else "heads"


class ActivateExperts(Activate):
    """The activation of each row, times the weight that the router gives it."""


class ExpertRow(Row):
    """The second matrix of the experts, and the sum over the rows of a token.

    With biases it also reads the routing, because a token's biases are weighted like its experts.
    """

    @property
    def reads_without_gradient(self) -> tuple[str, ...]:  # type: ignore[override]  # of a class elsewhere
        return () if "routing" in self.reads else ("routing",)

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(name for name in self.reads if name == "routing" or not self.frozen)


@dataclass(frozen=True, eq=False)
class Heads(Operation):
    """Makes q, k and v for attention: norms of q and k if `normed`, then RoPE if the model has it.

    Without norms, q, k and v are parts of the input, rotated in place.
    """

    normed: bool = False

    @property
    def in_place(self) -> bool:
        return not self.normed


class Attention(Operation):
    """Exact causal attention over all tokens before, and the log-sum-exp of its scores."""

    token_wise = False


class DeltaNet(Operation):
    """A gated delta net over all tokens before (memo.attention.delta_rule)."""

    token_wise = False


class Gate(Operation):
    """The output of attention, times a gate with the same number of channels."""

    replays = True


class Opaque(Operation):
    """One half of a custom layer (memo.spec.custom_layer): `module` is a method of the layer.

    Its backward runs it again under a graph of its own. Its first output is the half's result; the rest are outputs of
    matrices, which read them from the slot when the half runs again.
    """

    writes_to_slot = True

    @property
    def is_second(self) -> bool:
        """Whether it is the half after attention, whose output it reads."""
        return len(self.reads) > 1

    def layout_of(self, name: str) -> Layout:
        return "tokens" if name == "layer_output" else "heads"
