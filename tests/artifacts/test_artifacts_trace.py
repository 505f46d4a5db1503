"""Memory traces: round trip, and one message for everything that makes no sense."""

import json
from pathlib import Path
from typing import Any

import pytest

from memo.artifacts.memory_trace import MAX_BYTES, Event, Free, Malloc, Phase, Request, Trace, check_trace, requests
from memo.errors import ArtifactError, TraceError

TRACE = Trace(
    "cpu",
    "recorded",
    (
        Phase("layer_forward", 0, 1, (Malloc(7, 100), Malloc(3, 50), Free(7))),
        Phase("loss", -1, 1, (Malloc(9, 10),)),
        Phase("layer_backward", 0, 1, (Free(3), Malloc(4, 1), Free(4))),
    ),
    {"seq_length": 64},
)


def one_phase(*events: Event) -> Trace:
    return Trace("cpu", "recorded", (Phase("layer_forward", 2, 0, events),))


def test_round_trip(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == TRACE


def test_requests_live_from_malloc_to_free() -> None:
    assert requests(TRACE) == [
        Request(7, 100, lower=0, upper=2, phase=0, freed_in=0),
        Request(3, 50, lower=1, upper=4, phase=0, freed_in=2),
        Request(9, 10, lower=3, upper=7, phase=1, freed_in=None),
        Request(4, 1, lower=5, upper=6, phase=2, freed_in=2),
    ]


def test_phases_name_layer_and_microbatch_where_there_is_one() -> None:
    assert [str(phase) for phase in TRACE.phases] == [
        "layer_forward layer 0 microbatch 1",
        "loss microbatch 1",
        "layer_backward layer 0 microbatch 1",
    ]


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (one_phase(Malloc(1, -5)), r"event 0 \(layer_forward layer 2 microbatch 0\): request 1 has -5 bytes"),
        (one_phase(Malloc(1, 0)), "request 1 has 0 bytes"),
        (one_phase(Malloc(1, MAX_BYTES), Malloc(2, MAX_BYTES + 1)), f"event 1 .*request 2 has {MAX_BYTES + 1} bytes"),
        (one_phase(Malloc(1, 8), Free(2)), "event 1 .*request 2 is freed before it is made"),
        (one_phase(Malloc(1, 8), Free(1), Free(1)), "event 2 .*request 1 is freed twice"),
        (one_phase(Malloc(1, 8), Free(1), Malloc(1, 8)), "event 2 .*request 1 is made a second time"),
        (one_phase(), "the trace has no request: record"),
        (Trace("cpu", "recorded", ()), "the trace has no request: record"),
    ],
)
def test_what_makes_no_sense_is_named(trace: Trace, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        check_trace(trace)
    with pytest.raises(TraceError, match=message):
        requests(trace)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("phases", 0, "events", 0), ["malloc", 1, 8.5], r"phases\[0\].events\[0\] is \['malloc', 1, 8.5\], neither "),
        (("phases", 0, "events", 0), ["malloc", 1], r"is \['malloc', 1\], neither "),
        (("phases", 0, "events", 0), ["realloc", 1, 8], r"is \['realloc', 1, 8\], neither "),
        (("phases", 0, "events", 0), ["free", 7], "request 7 is freed before it is made"),
        (("phases", 0), {"kind": "loss"}, r"phases\[0\] has no field layer"),
        (("phases",), 3, r"phases is 3 \(a whole number\): give a list"),
        (("version",), 99, "version 99 of memory_trace"),
        (("schema",), "memory_plan", "holds 'memory_plan', but a 'memory_trace' is needed"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str) -> None:
    file = tmp_path / "trace.json"
    TRACE.save(file)
    body = json.loads(file.read_text())
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match=message):
        Trace.load(file)
