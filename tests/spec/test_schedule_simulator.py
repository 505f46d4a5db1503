"""The simulator against hand-made faults, and against an independent check of thousands of mutants.

The independent check draws the runtime's rules as a graph of happens-before and looks for a cycle:

    C(s, i)  action i of stage s is computed    after S(s, i - 1) and after the S that sends its input
    S(s, i)  its output is handed over          after C(s, i) and once the previous message of the same link
                                                has its receive: action j is posted after S(target, j - 2)
"""

import random
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest
from schedules import simulate

from memo.errors import ScheduleError
from memo.spec.schedule import Action, Link, Pipeline, breadth_first, link_of, one_f_one_b

Node = tuple[str, int, int]


def parse(text: str) -> list[Action]:
    """`"F0 B0.1"` -> actions."""
    words = [(word[0], *word[1:].partition(".")) for word in text.split()]
    return [Action("F" if kind == "F" else "B", int(m), int(chunk or 0)) for kind, m, _, chunk in words]


def can_run(pipeline: Pipeline, schedules: list[list[Action]]) -> bool:
    """Whether complete schedules run to their end with every message in the order it is awaited."""
    at = {(stage, a): i for stage, actions in enumerate(schedules) for i, a in enumerate(actions)}
    if any(i > at[stage, Action("B", a.microbatch, a.chunk)] for (stage, a), i in at.items() if a.kind == "F"):
        return False
    graph: dict[Node, set[Node]] = defaultdict(set)
    messages: dict[Link, list[tuple[int, int]]] = defaultdict(list)  # (target stage, index) in sending order
    for stage, actions in enumerate(schedules):
        for i, action in enumerate(actions):
            graph["C", stage, i] |= {("S", stage, i - 1)} if i else set()
            graph["S", stage, i].add(("C", stage, i))
            if (source := pipeline.source(stage, action)) is not None:
                graph["C", stage, i].add(("S", source[0], at[source]))
            if (target := pipeline.target(stage, action)) is not None:
                sent = messages[link_of(stage, action, *target)]
                if sent and sent[-1][1] >= 2:
                    graph["S", stage, i].add(("S", sent[-1][0], sent[-1][1] - 2))
                sent.append((target[0], at[target]))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return all(sent == sorted(sent) for sent in messages.values())


def accepts(pipeline: Pipeline, schedules: list[list[Action]]) -> bool:
    try:
        simulate(pipeline, schedules)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(1, 1, 3),
        Pipeline(2, 1, 4),
        Pipeline(3, 1, 5),
        Pipeline(4, 1, 6),
        Pipeline(2, 2, 4),
        Pipeline(3, 2, 6),
    ],
    ids=str,
)
def test_simulator_agrees_with_the_graph_on_swapped_actions(pipeline: Pipeline) -> None:
    rng = random.Random(5)
    verdicts = []
    for _ in range(150):
        schedules = [one_f_one_b(pipeline, stage) for stage in range(pipeline.stages)]
        for _ in range(rng.randint(1, 3)):
            actions = rng.choice(schedules)
            i = rng.randrange(len(actions) - 1)
            j = i + 1 if rng.random() < 0.7 else rng.randrange(len(actions))
            actions[i], actions[j] = actions[j], actions[i]
        verdicts.append(can_run(pipeline, schedules))
        assert accepts(pipeline, schedules) == verdicts[-1], schedules
    assert 0 < sum(verdicts) < len(verdicts)  # both verdicts occur


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["F0 F1 B1 B0", "F0 B0 F1 B1"], r"stage 0 awaits the input of B1, but B0 was sent first"),
        (["F0 F1 B0 B1", "F1 B1 F0 B0"], r"stage 1 awaits the input of F1, but F0 was sent first"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], r"deadlocks: stage 0 at B0, stage 1 at F1"),
        (["F0 F1 B0 B1", "B0 F0 F1 B1"], r"stage 1: B0 stands before F0"),
        (["F0 B0 B1", "F0 B0 F1 B1"], r"stage 0: actions missing or repeated: F1$"),
        (["F0 F1 B0 B1", "F0 B0 F1 B1 B1"], r"stage 1: actions missing or repeated: B1$"),
        (["F0 F1 B0 B1", "F0 B0 F1 B2"], r"stage 1: actions missing or repeated: B1, B2$"),
    ],
    ids=["swapped", "order", "deadlock", "backward-first", "dropped", "repeated", "unknown"],
)
def test_simulator_names_what_is_wrong(stages: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(Pipeline(2, 1, 2), [parse(text) for text in stages])


def test_one_unreceived_message_a_link_is_enough_for_a_stage_that_lags() -> None:
    ahead, lagging = "F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"
    assert simulate(Pipeline(2, 1, 4), [parse(ahead), parse(lagging)]) == [4, 1]


def test_limits_of_the_links_count() -> None:
    """With unlimited buffers this would run: F4 waits for the receive of F3, that for B1, that for F4."""
    schedules = [
        parse("F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5"),
        parse("F0 F1 F2 B0 B1 B2 F3 F4 F5 B3 B4 B5"),
    ]
    with pytest.raises(ScheduleError, match="deadlocks: stage 0 at F5, stage 1 at B2"):
        simulate(Pipeline(2, 1, 6), schedules)


def test_one_stage_alone_sends_itself_no_messages_but_keeps_their_order() -> None:
    pipeline = Pipeline(1, 3, 8, breadth_first=True)
    assert simulate(pipeline, [breadth_first(pipeline)]) == [24]
    with pytest.raises(ScheduleError, match=r"stage 0: F0\.1 stands before F0$"):
        simulate(Pipeline(1, 2, 1), [parse("F0.1 F0 B0.1 B0")])
