"""The phases of a layer's weights and of its gradient, and the slots that hold them."""

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor
from torch.distributed import Work

from memo.errors import PlanError
from memo.executor.streams import Event


class Phase(Enum):
    """The phase of a layer's weights, or of one of its gradients, on the device.

        weights     AWAY -> ARRIVING -> IN_USE -> KEPT -> IN_USE ...; AWAY when another layer takes the slot
        gradient    AWAY -> ARRIVING -> IN_USE -> LEAVING -> AWAY; KEPT between microbatches if no layer takes the slot

    Weights and gradient do not wait for each other: the weights for the next microbatch may arrive while the gradient
    of the last microbatch leaves. Resident weights and gradients are KEPT while they are not in use.
    """

    AWAY = "away"
    ARRIVING = "arriving"
    IN_USE = "in use"
    KEPT = "kept"
    LEAVING = "leaving"


_NEXT = {
    Phase.AWAY: (Phase.ARRIVING,),
    Phase.ARRIVING: (Phase.IN_USE, Phase.AWAY),
    Phase.IN_USE: (Phase.KEPT, Phase.LEAVING),
    Phase.KEPT: (Phase.IN_USE, Phase.AWAY),
    Phase.LEAVING: (Phase.KEPT, Phase.AWAY),
}


@dataclass
class StateSlot:
    """A rounding buffer of states.

    Attributes:
        shard: receives this rank's shard before the gather; None if nothing is gathered from host memory.
        holder: the weights or the gradient that the buffer belongs to.
        filled, works: the copies and messages to wait for before the content is used.
        free: the event to wait for before the content is overwritten.
    """

    name: str
    flat: Tensor
    shard: Tensor | None = None
    holder: "SlotUser | None" = None
    filled: Event = None
    works: list[Work] = field(default_factory=list)
    free: Event = None


class SlotUser:
    """The weights of one layer, or one gradient of it: their phase, and their slot while they have one."""

    def __init__(self, name: str, is_resident: bool) -> None:
        self.name = name
        self.slot: StateSlot | None = None
        self.phase = self._rest = Phase.KEPT if is_resident else Phase.AWAY

    @property
    def is_at_rest(self) -> bool:
        """Whether it is in its phase between two steps: KEPT if it is resident, else AWAY."""
        return self.phase is self._rest

    def enter(self, phase: Phase, call: str) -> None:
        """Enter a phase. `enter`, `arrive` and `leave` raise PlanError if it cannot follow the present phase.

        `call` names the caller in the message.
        """
        if phase not in _NEXT[self.phase]:
            raise PlanError(
                f"{call}: {self.name} cannot go from {self.phase.value!r} to {phase.value!r};"
                " plan for the schedule that runs, and call next_step() after an interrupted step"
            )
        self.phase = phase

    def arrive(self, slot: StateSlot, call: str) -> None:
        """Take a slot, which must have no holder."""
        if slot.holder is not None:
            raise PlanError(f"{call}: {slot.name} still has {slot.holder.name}, {slot.holder.phase.value!r}")
        self.enter(Phase.ARRIVING, call)
        self.slot, slot.holder = slot, self

    def leave(self, call: str) -> None:
        """Give the slot up, if there is one."""
        self.enter(self._rest, call)
        self.let_go()

    def let_go(self) -> None:
        """Give the slot up in any phase; its content is no longer valid."""
        self.phase = self._rest
        if self.slot is not None:
            self.slot.holder = None
        self.slot = None
