"""Reads the weights of a run for an export: from its checkpoint, and frozen weights from the initial model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.hugging_face.weights import PretrainedWeights
from memo.checkpoint.index import Index, StoredTensor
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import MASTER, read_tensors
from memo.errors import ConfigError


@dataclass(frozen=True)
class RunWeights:
    """A checkpoint; `base`: the model whose weights the run had frozen, if the checkpoint lacks these."""

    final: Path
    index: Index
    verify: bool
    base: PretrainedWeights | None = None

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """Weights by global name."""
        own = {name.removeprefix(MASTER): each for name, each in self.index.items() if name.startswith(MASTER)}
        if self.base is None:
            return own
        dtypes = {name: str(self.base.dtype(name)).removeprefix("torch.") for name in self.base.shapes}
        return {name: StoredTensor(shape, dtypes[name], ()) for name, shape in self.base.shapes.items()} | own

    def fill(self, masters: Mapping[str, GlobalTensor]) -> None:
        """Read weights by global name into `masters`. Raises CheckpointError."""
        tensors = {key: values for name, values in masters.items() if (key := f"{MASTER}{name}") in self.index}
        read_tensors(self.final, self.index, tensors, verify=self.verify)
        for name in masters.keys() - {key.removeprefix(MASTER) for key in tensors}:
            assert self.base is not None, f"nothing has {name}"
            for part in masters[name].parts:
                part.values().copy_(self.base.read(name, part.offset, part.shape))


def check_base(final: Path, state: RunState, base: str | Path | None) -> None:
    """Raises ConfigError if `base` is missing though needed to write the whole model, or given though not needed."""
    if state.base and base is None:
        raise ConfigError(
            f"{final} has no weights that its run had frozen: name the Hugging Face directory of the model that it "
            "started from with --base"
        )
    if base is not None and not state.base:
        raise ConfigError(f"--base {base}: {final} has all weights of its model: leave the flag out")
