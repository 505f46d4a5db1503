"""In which order a sweep issues its copies: those of one stream run one after another."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from layouts import tiny
from swapped_steps import Workplace, profiled_once

from memo.executor.cpu_streams import VirtualStreams
from memo.executor.runtime import SweepRuntime
from memo.executor.streams import Stream

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_is_waited_for_first_is_copied_first() -> None:
    """A backward begins with all keys and values, and a forward's next sections need the slot."""
    issued: list[tuple[str, list[str]]] = []
    end_section, copy = SweepRuntime.end_section, VirtualStreams.copy

    def ends(runtime: SweepRuntime, kind: str, layer: int, section: int) -> None:
        issued.append((kind, []))
        end_section(runtime, kind, layer, section)

    def copies(streams: VirtualStreams, stream: Stream, dst: torch.Tensor, src: torch.Tensor, to: str, of: str) -> None:
        if issued and stream in (Stream.OFFLOAD, Stream.PREFETCH):
            issued[-1][1].append(of if stream is Stream.OFFLOAD else to)
        copy(streams, stream, dst, src, to, of)

    swept: dict[str, Any] = {
        "offload_granularity": "tile",
        "offload_slot_tiles": 1,
        "offload_tiles": 4,
        "profile_cache": "off",
    }
    workplace = Workplace(tiny("llama-tiny", num_layers=3, global_batch_size=1), 1)
    with profiled_once():
        model = workplace.build(offload_alpha=0.5, **swept)
    batches = workplace.batches(4, swept=True)
    with patch.object(SweepRuntime, "end_section", ends), patch.object(VirtualStreams, "copy", copies):
        workplace.step(model, batches)
    orders = {kind: {tuple(_kinds(names)) for of, names in issued if of == kind} for kind in "FB"}
    assert orders["B"] >= {("keys", "slot")}
    assert orders["F"] >= {("slot", "keys")}
    assert ("slot", "keys") not in orders["B"]
    assert ("keys", "slot") not in orders["F"]


def _kinds(names: list[str]) -> list[str]:
    return ["keys" if name.startswith("key/value") else "slot" for name in names]
