"""The operations that layers consist of: what each reads and makes, and what its backward needs of that.

Values have names. What a walk (memo.program.walk) must know of an operation stands in its attributes; what it computes,
requests and costs is told by the machines that run it.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from memo.spec.skeleton import Layout


@dataclass(frozen=True, eq=False)
class Operation:
    """Attributes:
    reads, makes: names of values.
    module: the path, within a layer, of the module that has its weights.
    frozen: whether its matrices are not trained, nor adapters beside them, so that their backward needs no input.
    token_wise: whether it may run on any range of tokens by itself.
    layout: what tensor parallelism splits of what it makes: tokens, or heads, which is the width, or nothing (whole).
    gathers: whether it needs all tokens of what it reads, which tensor-parallel ranks share.
    scatters: whether its results are summed over tensor-parallel ranks, each of which keeps the sums of its tokens.
    replays: whether its backward runs its forward again, under a graph of its own, whatever is kept.
    has_place: whether it writes what it makes straight to where it is kept.
    is_sum: whether the gradient of what it makes is that of each value that it reads.
    takes_sums: whether one kernel does the same to a sum that is made just before, and makes that as well.
    recalled: what it makes that is kept in any case; where it runs again, and in backward, it takes this instead.
    takes: what it reads that no gradient goes to.
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
    has_place: ClassVar[bool] = False
    is_sum: ClassVar[bool] = False
    takes_sums: ClassVar[bool] = False
    recalled: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[tuple[str, ...]] = ()

    def layout_of(self, name: str) -> Layout:
        """What tensor parallelism splits of one value that it makes."""
        return self.layout

    @property
    def needs(self) -> tuple[str, ...]:
        """The values that its backward takes; one that replays has them in its graph."""
        return () if self.replays or self.is_sum or self.frozen else self.reads


class Norm(Operation):
    """LayerNorm or RMSNorm over the width."""

    layout = "tokens"
    replays = takes_sums = True


class Add(Operation):
    """The sum of two values."""

    layout = "tokens"
    is_sum = True


class Column(Operation):
    """A matrix whose outputs are split over tp, behind a gather of its input's tokens."""

    gathers = has_place = True


class Row(Operation):
    """A matrix whose inputs are split over tp, before a sum over tp that leaves each rank its tokens."""

    layout = "tokens"
    scatters = True


class Activate(Operation):
    """The activation of an MLP; of a gated one, from gate and up."""

    replays = True


class Scores(Column):
    """A matrix whose outputs are few: each rank of tp has all of them, and a part of their gradients."""

    layout = "whole"


class ActivateScored(Activate):
    """The activation of an MLP, times the sigmoid of a token's score."""


class ExpertColumn(Column):
    """The router, and the first matrix of the experts that it chooses for each token (memo.parallel.experts).

    The choice is made once: rounding in another place might change it.
    """

    recalled = ("routing",)

    def layout_of(self, name: str) -> Layout:
        return "whole" if name == "routing" else "heads"


class ActivateExperts(Activate):
    """The activation of each row, times the weight that the router gives it."""


class ExpertRow(Row):
    """The second matrix of the experts, and the sum over the rows of a token.

    Where it has biases, a token takes them by the weights of its experts, and reads its routing.
    """

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]  # of a class elsewhere
        return () if "routing" in self.reads else ("routing",)

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(name for name in self.reads if name == "routing" or not self.frozen)


@dataclass(frozen=True, eq=False)
class Heads(Operation):
    """q, k and v as attention takes them: norms of q and k if `normed`, then RoPE if the model has it.

    Without norms they are parts of the value that it reads, rotated where that lies.
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
    """What attention gives, times a gate of as many channels."""

    replays = True


class Opaque(Operation):
    """One half of a custom layer (memo.spec.custom_layer): `module` is a method of the layer.

    Its backward runs it again under a graph of its own. It makes one value, and then the outputs of those of its
    matrices that find them in the slot when it runs again.
    """

    has_place = True

    def layout_of(self, name: str) -> Layout:
        return "tokens" if name == "layer_output" else "heads"
