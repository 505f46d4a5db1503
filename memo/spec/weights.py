"""One parameter as a fact: the global tensors that it holds, and how tensor parallelism splits it.

split        share of a rank of tp                 replicated  decays
rows         its rows of each tensor, one below    no          if a matrix
             the other (a fused qkv is three)
columns      its columns                           no          if a matrix
vocabulary   its rows, padded to as many on        "embedding" yes
             every rank                            where tied
whole        all; each rank sees other tokens,     "tp"        if a table of positions
             so gradients are summed over tp
"""

import math
from typing import Literal, NamedTuple

from memo.config.derived import vocab_rows_per_rank

Split = Literal["rows", "columns", "vocabulary", "whole"]
Replicated = Literal["", "tp", "embedding", "all"]
"""Ranks that hold the same values but see other tokens or uses, so that the gradient is summed over them. all: every
rank, without a gradient."""
Init = Literal["normal", "ones", "zeros", "log_uniform", "uniform_by_columns"]
"""uniform_by_columns: between -1 and 1 over the square root of the number of columns, as in torch.nn.Linear."""


class Weight(NamedTuple):
    """A parameter of a module; matrices are [out, in].

    Attributes:
        name: path of the module's attribute, such as "attention.qkv.weight".
        parts: name and number of rows of each global tensor; all have the same columns.
        columns: None for a vector.
        tied: the table that embedding and head share.
        experts: the number of experts whose matrices stand one below the other; 0: all tokens use all rows.
        frozen: whether training leaves it as it is, so that it has no gradient, no master and no moments.
        coded: whether it is frozen and stored in few bits (memo.spec.quantized).
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    columns: int | None
    split: Split
    init: Init = "normal"
    tied: bool = False
    experts: int = 0
    frozen: bool = False
    coded: bool = False

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._with_columns(self.rows)

    def part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the global tensors, by name."""
        return {name: self._with_columns(rows) for name, rows in self.parts}

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape on each rank of tp, which divides the dim that it splits; a table of the vocabulary is padded."""
        if self.split == "vocabulary":
            return self._with_columns(vocab_rows_per_rank(self.rows, tp))
        if self.split == "columns":
            return (self.rows, (self.columns or 1) // tp)
        return self._with_columns(self.rows // tp if self.split == "rows" else self.rows)

    @property
    def numel(self) -> int:
        """Elements of the global tensors."""
        return math.prod(self.shape)

    def local_numel(self, tp: int) -> int:
        return math.prod(self.local_shape(tp))

    @property
    def replicated(self) -> Replicated:
        if self.tied:
            return "embedding"
        return "tp" if self.split == "whole" else ""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to weights that are drawn at random, so not to norms and biases, and to both
        matrices of an adapter."""
        return self.init == "normal" or is_of_adapter(self.name)

    def _with_columns(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.columns is None else (rows, self.columns)


def is_of_adapter(name: str) -> bool:
    """Whether a parameter is one of the two matrices of LoRA (memo.spec.lora)."""
    return ".adapter." in name


def one(
    name: str, rows: int, columns: int | None = None, split: Split = "whole", init: Init = "normal", tied: bool = False
) -> Weight:
    """A parameter that is one global tensor of the same name."""
    return Weight(name, ((name, rows),), columns, split, init, tied)
