"""The course of a step on one stage: everything that decides the order of its memory requests, without their bytes."""

from typing import NamedTuple

from memo.spec.placement import LayerPlaces, StatePlacement


class Course(NamedTuple):
    """One stage in a step.

    Attributes:
        microbatches: number that is walked through; microbatches beyond a schedule's steady phase are left out, except
            breadth first.
        kinds: kind of each layer of the stage, chunk by chunk; layers of one kind have the same passes.
        in_place, keeps_input: as in memo.estimate.program.passes.LayerPasses.
        placement: placement of the states.
        shards: whether gradients are reduced over several ranks.
        reduces_each: whether the gradients of every microbatch are reduced.
        overlaps: whether the reductions of the last microbatch begin during its backward.
        trained: whether any weight is trained, for each kind of layer, the embedding and the head.
        has_tails: whether the reduction of a layer begins within its backward.
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
        """Number of layers of a chunk."""
        return len(self.kinds) // self.vpp

    # Modules of a stage are numbered in order: of each chunk the embedding, the layers and the head.

    @property
    def num_modules(self) -> int:
        return self.vpp * (self.layers + 2)

    def is_layer(self, owner: int) -> bool:
        return 1 <= owner % (self.layers + 2) <= self.layers

    def _position(self, owner: int) -> int:
        """Return the position of a layer among the layers of the stage."""
        chunk, within = divmod(owner, self.layers + 2)
        return chunk * self.layers + within - 1

    def kind_of(self, owner: int) -> int:
        return self.kinds[self._position(owner)]

    def places(self, owner: int) -> LayerPlaces:
        """Return the places of the states of a module."""
        if self.is_layer(owner):
            return self.placement.of_layer(self._position(owner))
        return self.placement.of_ends
