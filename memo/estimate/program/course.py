"""The course of a step on one stage: all that decides in which order its requests follow each other, but no bytes."""

from typing import NamedTuple

from memo.spec.placement import LayerPlaces, StatePlacement


class Course(NamedTuple):
    """One stage in a step.

    Attributes:
        microbatches: of which those beyond a schedule's steady phase are left out, except breadth first.
        kinds: of each layer of the stage, chunk by chunk, that of its passes.
        in_place, keeps_input: as of memo.estimate.program.passes.LayerPasses.
        placement: of the states.
        shards: whether gradients are reduced over other ranks.
        reduces_each: of every microbatch.
        overlaps: the reductions of the last microbatch begin during its backward.
        trained: the kinds of layers, the embedding and the head: whether any of their weights are.
        has_tails: whether the reductions of layers begin in their backwards.
        on_cuda: whether the device is a GPU.
    """

    pp: int
    vpp: int
    stage: int
    microbatches: int
    breadth_first: bool
    kinds: tuple[int, ...]
    in_place: bool
    keeps_input: bool
    placement: StatePlacement
    shards: bool
    reduces_each: bool
    overlaps: bool
    trained: tuple[bool, ...]
    has_tails: bool
    on_cuda: bool

    @property
    def layers(self) -> int:
        """Of a chunk."""
        return len(self.kinds) // self.vpp

    # Modules are numbered as in memo.spec.buckets.stage_modules: of each chunk embedding, layers, head.

    @property
    def num_modules(self) -> int:
        return self.vpp * (self.layers + 2)

    def is_layer(self, owner: int) -> bool:
        return 1 <= owner % (self.layers + 2) <= self.layers

    def _position(self, owner: int) -> int:
        """Of a layer among those of the stage."""
        chunk, within = divmod(owner, self.layers + 2)
        return chunk * self.layers + within - 1

    def kind_of(self, owner: int) -> int:
        return self.kinds[self._position(owner)]

    def places(self, owner: int) -> LayerPlaces:
        """Where the states of a module are."""
        if self.is_layer(owner):
            return self.placement.of_layer(self._position(owner))
        return self.placement.of_ends
