"""Planted faults of a sweep: each is told by the checker of races, by poison, or by other numbers."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from layouts import tiny
from ranks import run_ranks
from swapped_steps import Workplace, differences, observed, profiled_once
from torch import Tensor

from memo.attention.delta_rule import DeltaNet
from memo.errors import MemoError
from memo.executor.hidden_states import HiddenOnHost
from memo.executor.key_values import Heads, KeyValues, KeyValueSwapper
from memo.executor.section_stream import SectionStream
from memo.executor.swapper import Swapper
from memo.executor.sweep import SweptLayer
from memo.executor.tile_machine import Tile
from memo.parallel import context, context_sweep, stage_messages
from memo.parallel.collectives import group_rank, group_size
from memo.parallel.context import ContextAttention
from memo.parallel.context_delta import ContextDelta
from memo.parallel.stage_messages import MessagesInSections
from memo.spec.delta import TAPS
from memo.spec.rendezvous import Rendezvous

TILES = 4
SWEPT: dict[str, Any] = {
    "params_dtype": "fp64",
    "offload_granularity": "tile",
    "offload_tiles": TILES,
    "offload_alpha": 0.5,
    "offload_slot_tiles": 1,
    "recompute_attention_layers": 1,
    "offload_hidden_states": True,
    "profile_cache": "off",
}


def keeps_the_sums(right: Callable[..., Any], layer: SweptLayer, grad: Tensor, context: Any) -> Tensor:
    """The sums of a layer's gradients of keys and values begin with those of the layer before."""
    with patch.object(layer.memory.keys, "sums", _NeverZero(layer.memory.keys.sums)):
        result: Tensor = right(layer, grad, context)
    return result


class _NeverZero:
    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    def zero_(self) -> None:
        pass

    def __getitem__(self, rows: slice) -> Tensor:
        return self.sums[rows]


def begins_one_part(right: Callable[..., Any], keys: KeyValueSwapper, kind: str, layer: int, section: int) -> None:
    """A backward waits only for the part of its first section."""
    if kind == "B" and section == keys.sections - 1:
        for swapper in keys.swappers:
            with patch.object(swapper.backend, "wait", lambda *_: None):
                swapper.begin(kind, layer)
        return
    right(keys, kind, layer, section)


def ends_forward_early(right: Callable[..., Any], keys: KeyValueSwapper, kind: str, layer: int, section: int) -> None:
    """A part is given away after its section of the backward's first tile, while earlier sections still read it."""
    if kind == "B" and section == keys.sections - 1:
        for swapper in reversed(keys.swappers):
            swapper.end(kind, layer)
    elif kind == "F":
        right(keys, kind, layer, section)


def adds_to_a_copy(right: Callable[..., Any], keys: KeyValues, row: int, heads: Heads) -> Tensor:
    """What a tile gives to the gradients of keys and values before it is lost."""
    sums: Tensor = right(keys, row, heads)
    return sums.clone()


def slides_without_sums(right: Callable[..., Any], keys: KeyValues, kind: str, section: int) -> range:
    """Sums of gradients stay where they are in the store, which is another section's place then."""
    before = keys.sums.clone()
    fetched: range = right(keys, kind, section)
    keys.sums.copy_(before)
    return fetched


def takes_without_waiting(name: str) -> Callable[..., None]:
    """What is read of the stream with this name has not arrived."""

    def fault(right: Callable[..., Any], stream: SectionStream, *of: Any) -> None:
        if stream.swapper.name != name:
            return right(stream, *of)
        with patch.object(stream.swapper.backend, "wait", lambda *_: None):
            right(stream, *of)

    return fault


def skips_a_wait(right: Callable[..., Any], swapper: Swapper, *of: Any) -> None:
    """A copy of hidden states does not wait for what it copies, or overwrites."""
    if swapper.name != "hidden states ":
        return right(swapper, *of)
    with patch.object(swapper.backend, "wait", lambda *_: None):
        right(swapper, *of)


def takes_the_neighbour(right: Callable[..., Any], hidden: HiddenOnHost, x: Tensor, section: int) -> Tensor:
    """A gradient is taken from the place of another section."""
    part: Tensor = right(hidden, x, section ^ (hidden.stream.swapper.current.op.layer == 6))
    return part


def stays_where_it_was(right: Callable[..., Any], hidden: HiddenOnHost, part: Tensor, section: int) -> None:
    """What the second layer's backward has made of a section is not put where the next module finds it."""
    if hidden.stream.swapper.current.op.layer == 7:
        part = part.clone().zero_()
    right(hidden, part, section)


def runs_attention_once(right: Callable[..., Any], layer: SweptLayer, context: Any) -> None:
    """The second forward passes its sections, but computes nothing."""
    with patch.object(layer, "tiles", []):
        right(layer, context)


def gathers_all_but_one_tile(right: Callable[..., Any], core: ContextAttention, own: Tensor, before: Tensor) -> None:
    """Other ranks' keys and values of the second tile are those of another layer."""
    if before.shape[0] != 2 * own.shape[0] * core.ring_size:
        right(core, own, before)


def gathers_nothing_again(right: Callable[..., Any], *of: Any) -> None:
    """A backward finds the keys and values of another layer's tokens on other ranks."""


def sums_nothing(right: Callable[..., Any], x: Tensor, group: Any) -> Tensor:
    """Each rank keeps what its own queries give to its tokens."""
    return x.chunk(group_size(group))[group_rank(group)]


def sends_nothing(right: Callable[..., Any], x: Tensor, group: Any) -> Tensor:
    """Each rank takes the heads that it should send for those that it should receive."""
    return x


def begins_anew(right: Callable[..., Any], layer: SweptLayer, kept: Any, section: Tile, tile: Tile, *of: Any) -> None:
    """A tile of a delta net does not wait for what the one before it carries on."""
    if (section.index, tile.index) == (1, 0):
        layer._carry = None
    right(layer, kept, section, tile, *of)


def runs_backwards(right: Callable[..., Any], layer: SweptLayer, *of: Any) -> Any:
    """A delta net's tiles are computed before their predecessors in the section."""
    if not layer.kind.is_linear:
        return right(layer, *of)
    with patch.object(layer, "tiles", layer.tiles[::-1]):
        return right(layer, *of)


def carries_no_tokens(right: Callable[..., Any], net: DeltaNet, x: Tensor, carry: Tensor, *of: Any) -> Any:
    """The convolution of a tile begins as if no token stood before it."""
    carry = carry.clone()
    carry[:, : (TAPS - 1) * len(net.kernels)] = 0.0
    return right(net, x, carry, *of)


def carries_no_gradient(right: Callable[..., Any], core: ContextDelta, *of: Any) -> Any:
    """What later tiles give to the gradient of a carry is lost."""
    return right(core, *of[:-1], None)


def takes_the_next_carry(right: Callable[..., Any], core: ContextDelta, *of: Any) -> Any:
    """A backward begins its tile with what the tile carried on, not with what it was given."""
    *given, carry, grad_carry = of
    grad_out, mixed, _, documents, start = given
    after = core.forward(mixed, torch.empty_like(grad_out), documents, start, carry)
    return right(core, *given, after, grad_carry)


def exchanges_nothing(right: Callable[..., Any], core: ContextDelta, *of: Any) -> Any:
    """As above, of a delta net alone."""
    with patch.object(context, "all_to_all", lambda x, _: x):
        return right(core, *of)


def receives_nothing(right: Callable[..., Any], x: Tensor, *of: Any) -> Any:
    """What is received of a section stays elsewhere."""
    return right(x.clone(), *of)


def sends_rows_in_another_order(right: Callable[..., Any], x: Tensor, *of: Any) -> Any:
    """What is sent of a section is not what the plan has taken."""
    return right(x.roll(1, 0), *of)


def puts_all_sections_in_one(right: Callable[..., Any], messages: MessagesInSections, rendezvous: Rendezvous) -> None:
    """Each section that is received is the first one."""
    hidden = messages.hidden
    first: list[Tensor] = []

    def put(part: Tensor, section: int) -> None:
        first.append(part.clone())
        type(hidden).put(hidden, first[0], section)

    with patch.object(hidden, "put", put):
        right(messages, rendezvous)


Fault = tuple[Any, str, Callable[..., Any]]
"""The owner of a method, its name, and what stands in its place."""
FAULTS: dict[str, Fault] = {
    "sums are not set to zero": (SweptLayer, "run_backward", keeps_the_sums),
    "a backward does not wait for keys": (KeyValueSwapper, "begin", begins_one_part),
    "keys are given away early": (KeyValueSwapper, "end", ends_forward_early),
    "gradients of keys are lost": (KeyValues, "sums_before", adds_to_a_copy),
    "an input is not waited for": (SectionStream, "take", takes_without_waiting("layer input ")),
    "hidden states are not waited for": (SectionStream, "take", takes_without_waiting("hidden states ")),
    "hidden states are offloaded too early": (Swapper, "_offload", skips_a_wait),
    "hidden states are fetched too early": (Swapper, "_prefetch", skips_a_wait),
    "a gradient is of another section": (HiddenOnHost, "take", takes_the_neighbour),
    "a gradient is lost": (HiddenOnHost, "put", stays_where_it_was),
    "attention is not recomputed": (SweptLayer, "_forward_again", runs_attention_once),
}

WINDOW: dict[str, object] = {"window_size": 11, "offload_tiles": 2 * TILES}  # so that the store slides far
FAULTS_OF_WINDOWS: dict[str, Fault] = {
    "keys are not waited for": (SectionStream, "take", takes_without_waiting("key/value ")),
    "sums do not slide": (KeyValues, "begin", slides_without_sums),
}
DELTA_NETS: dict[str, object] = {"model": "qwen3.5-tiny"}
FAULTS_OF_DELTA_NETS: dict[str, Fault] = {
    "a tile does not wait for the carry": (SweptLayer, "_run_delta_net", begins_anew),
    "tiles are computed in another order": (SweptLayer, "_forward", runs_backwards),
    "gradients of tiles are computed in another order": (SweptLayer, "run_backward", runs_backwards),
    "the convolution carries no tokens": (DeltaNet, "run", carries_no_tokens),
    "the gradient of a carry is lost": (ContextDelta, "backward", carries_no_gradient),
    "a backward takes another carry": (ContextDelta, "backward", takes_the_next_carry),
}
STAGES: dict[str, object] = {"pp": 2, "num_layers": 4, "global_batch_size": 2}
GATHERED, EXCHANGED = ({"cp": 2, "cp_comm_type": kind} for kind in ("all_gather", "a2a"))
FAULTS_OF_GATHERS: dict[str, Fault] = {
    "a gather is left out": (context_sweep, "gather_rows", gathers_all_but_one_tile),
    "a backward does not gather": (SweptLayer, "_gather_again", gathers_nothing_again),
    "sums of ranks are not added": (context_sweep, "reduce_scatter", sums_nothing),
}
FAULTS_OF_EXCHANGED_DELTA_NETS: dict[str, Fault] = {
    "heads are not exchanged": (ContextDelta, "forward", exchanges_nothing),
    "gradients of heads are not exchanged": (ContextDelta, "backward", exchanges_nothing),
}
FAULTS_OF_STAGES: dict[str, Fault] = {
    "a message is lost": (stage_messages, "receive", receives_nothing),
    "a message is not what was taken": (stage_messages, "send", sends_rows_in_another_order),
    "sections are mixed up": (MessagesInSections, "_meet", puts_all_sections_in_one),
}
CASES: dict[str, tuple[int, dict[str, object], dict[str, Fault]]] = {
    "alone": (1, {}, FAULTS),
    "window": (1, WINDOW, FAULTS_OF_WINDOWS),
    "delta nets": (1, {**DELTA_NETS, "offload_slot_tiles": 2}, FAULTS_OF_DELTA_NETS),
    "gathered": (2, GATHERED, FAULTS_OF_GATHERS),
    "exchanged": (2, EXCHANGED, {"heads are not exchanged": (context, "all_to_all", sends_nothing)}),
    "exchanged delta nets": (2, {**EXCHANGED, **DELTA_NETS}, FAULTS_OF_EXCHANGED_DELTA_NETS),
    "stages": (2, STAGES, FAULTS_OF_STAGES),
}
"""How many ranks, flags, and faults."""


@pytest.mark.parametrize("name", CASES)
def test_every_fault_is_told(name: str) -> None:
    for unseen in run_ranks(CASES[name][0], faults_that_are_not_told, name):
        assert unseen == []


def faults_that_are_not_told(name: str) -> list[str]:
    """Faults with which a step ends as one without does: neither with another result, nor with an error."""
    world_size, layout, faults = CASES[name]
    how = {"model": "llama-tiny", "num_layers": 3, "global_batch_size": 1, **layout}
    swept = {**SWEPT, **{name: how.pop(name) for name in SWEPT.keys() & how.keys()}}
    workplace = Workplace(tiny(**how), world_size)
    batches = workplace.batches(swept["offload_tiles"], swept=True)
    unseen = []
    with profiled_once():
        expected = workplace.step(workplace.build(**swept), batches)
        for fault, (owner, method, faulty) in faults.items():
            right = getattr(owner, method)
            with observed(copies="lazy"):
                model = workplace.build(**swept)
            if fault == next(iter(faults)):
                assert differences(workplace.step(model, batches), expected) == []
            with (
                patch.object(owner, method, lambda *args, faulty=faulty, right=right: faulty(right, *args)),
                contextlib.suppress(MemoError),
            ):
                if not differences(workplace.step(model, batches), expected):
                    unseen.append(fault)
    return unseen
