"""Layers in host memory are updated while the next step begins: a use of a layer waits for the update of that layer."""

import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
from state_runs import StateRun
from swap_runs import stage_ops
from torch import Tensor

from memo.errors import PlanError
from memo.executor.cpu_streams import ThreadStreams, VirtualStreams
from memo.mesh import Mesh, RankGrid
from memo.spec.layer_ops import LayerOp
from memo.spec.placement import StatePlacement
from memo.train.optimizer import _Part

LAYERS, STEPS = 5, 3
OPS = stage_ops(1, 1, 2, LAYERS, 0)
PLACEMENTS = {
    "optimizer": StatePlacement(LAYERS, LAYERS),
    "all": StatePlacement(LAYERS, LAYERS, LAYERS, LAYERS),
    "weights of some": StatePlacement(LAYERS, LAYERS, 3, 2),
    "half": StatePlacement(LAYERS, 3, 3, 3),
}
ALONE = Mesh(RankGrid(), 0)
UPDATE = _Part.update
TIMEOUT_S = 60

pytestmark = pytest.mark.usefixtures("one_thread")


class Gated(StateRun):
    """A run in which the update of a layer waits for the operation before the one that needs it in the next step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.states is not None
        self.gates = {layer: threading.Event() for layer in self.positions}
        self.late: list[int] = []
        self.needed_at: dict[int, int] = {}  # by layer: index of the first operation that needs it
        for index, step in enumerate(self.states.plan.steps):
            for layer in (step.op.layer, *(fetch.layer for fetch in step.fetches)):
                self.needed_at.setdefault(layer, index)

    def _run(self, op: LayerOp) -> None:
        for layer, gate in self.gates.items():
            if op.kind == "B":
                gate.clear()
            elif self.needed_at[layer] == OPS.index(op) + 1:
                gate.set()
        super()._run(op)

    def open_all(self) -> None:
        for gate in self.gates.values():
            gate.set()

    def update(self, part: _Part, lr: float, factor: Tensor | None = None) -> None:
        if part.layer is not None and self.needed_at[part.layer] > 0:
            assert self.gates[part.layer].wait(TIMEOUT_S), f"layer {part.layer} is waited for before it is needed"
            self.late.append(part.layer)
        UPDATE(part, lr, factor)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_next_step_waits_for_no_more_than_the_layers_that_it_needs(name: str) -> None:
    """With the bits of a run whose states are all on the device."""
    right = StateRun(OPS, PLACEMENTS[name], None, ALONE)
    gated = Gated(OPS, PLACEMENTS[name], VirtualStreams(), ALONE)

    def update(part: _Part, *args: Any) -> None:
        gated.update(part, *args)

    with patch.object(_Part, "update", update):
        for _ in range(STEPS):
            right.step()
            gated.step()
        late = len(gated.late)
        gated.open_all()
        assert not gated.finish().differs_from(right.finish())
    parts = [part for part in gated.optimizer.parts if part.layer is not None]
    num_gated = sum(gated.needed_at[part.layer] > 0 for part in parts)
    assert late == (STEPS - 1) * num_gated > 0  # those of the last step were still waiting


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("evaluates", [False, True])
def test_whoever_reads_states_waits_for_slow_updates(name: str, evaluates: bool) -> None:
    """A checkpoint after a step, and an evaluation before it."""

    def slowly(*args: Any) -> None:
        time.sleep(0.02)
        UPDATE(*args)

    with patch.object(_Part, "update", slowly):
        found = []
        for backend in (None, VirtualStreams("lazy"), ThreadStreams()):
            work = StateRun(OPS, PLACEMENTS[name], backend, ALONE)
            for _ in range(2):
                work.step()
                if evaluates:
                    work.evaluate()
            found.append(work.finish())
    assert not any(each.differs_from(found[0]) for each in found[1:])


def test_an_update_that_fails_ends_the_next_use_of_its_layer() -> None:
    work = StateRun(OPS, PLACEMENTS["half"], VirtualStreams(), ALONE)

    def fail(part: _Part, *args: Any) -> None:
        if part.layer is not None:
            raise PlanError("no update")
        UPDATE(part, *args)

    with patch.object(_Part, "update", fail):
        work.step()
    with pytest.raises(PlanError, match="no update"):
        work.step()
