"""Walks as data: what is rebuilt, in which order messages go, and that every value lives as long as it is used."""

from collections.abc import Collection
from itertools import chain, combinations

import pytest

from memo.config import preset
from memo.program.kinds import Kind, kind_of
from memo.program.operations import Operation
from memo.program.walk import Machine, Step, backward, forward, gathered, gradient, graph, rebuilt

MODELS = ("gpt-tiny", "llama-tiny", "qwen3-tiny", "gemma-3-tiny", "qwen3.5-tiny", "olmo-3-tiny")
OUTSIDE = {"input", "attention_out", "qkv"}
KEEPABLE = ("attention_norm", "residual", "mlp_norm", "fc1", "activation")
OUTPUT = frozenset({"layer_output"})


def kind(model: str) -> Kind:
    return kind_of(preset(model))


def subsets() -> list[frozenset[str]]:
    counts = range(len(KEEPABLE) + 1)
    return [frozenset(some) for some in chain.from_iterable(combinations(KEEPABLE, count) for count in counts)]


class Watching(Machine):
    """Fails where a step takes what is not there; a value from outside or from the slot always is."""

    def __init__(self, there: Collection[str]) -> None:
        super().__init__({})
        self.there, self.kept = set(there), set[str]()

    def _do(self, step: Step, *_: Operation) -> None:
        for name in (*step.reads, *((step.adds_to,) if step.adds_to else ())):
            assert name in self.live or name in self.there, (step, name)
        assert not set(step.makes) & set(self.live), step
        self.live |= dict.fromkeys(step.makes, step)

    forward = replay = backward = gather = _do

    def keep(self, step: Step) -> None:
        self._do(step)
        self.kept |= set(step.reads)


@pytest.mark.parametrize("model", MODELS)
def test_a_forward_has_what_it_takes_and_leaves_its_targets(model: str) -> None:
    layer = kind(model)
    for kept in subsets():
        machine = Watching(OUTSIDE)
        machine.run(forward(layer.after, OUTPUT, kept))
        assert set(machine.live) == OUTPUT
        made = {name for operation in layer.after for name in operation.makes}
        assert machine.kept == (kept & made) - {"fc1"}  # which the product writes to its place


@pytest.mark.parametrize("model", MODELS)
def test_a_backward_has_what_it_takes_and_leaves_gradients_alone(model: str) -> None:
    layer = kind(model)
    for kept in subsets():
        for operations, incoming in ((layer.after, OUTPUT), (layer.before, frozenset({"heads", "input"}))):
            walk = backward(operations, kept | {"qkv"}, incoming)
            machine = Watching(OUTSIDE | kept | set(map(gradient, incoming)))
            machine.run(walk.steps)
            assert set(machine.live) == set(walk.gradients.values())
            assert set(walk.gradients) == {"input"} | ({"attention_out"} if operations is layer.after else set())


def lines(steps: tuple[Step, ...]) -> list[str]:
    return [f"{step.do} {' '.join(step.makes or step.reads)}" for step in steps]


def test_the_order_of_a_backward() -> None:
    """Messages are issued in the order in which they are first waited for: with fc1 kept, that of the output's gradient
    comes first; without, that of fc1's inputs."""
    after = kind("llama-tiny").after
    last = [
        "backward gradient of activation",
        "backward gradient of fc1",
        "backward gradient of mlp_norm",
        "backward gradient of residual",
        "gather gathered gradient of residual",
        "backward gradient of attention_out",
    ]
    assert lines(backward(after, frozenset({"residual", "fc1"}), OUTPUT).steps) == [
        "gather gathered gradient of layer_output",
        "replay graph of mlp_norm mlp_norm",
        "gather gathered mlp_norm",
        "replay graph of activation activation",
        *last,
    ]
    assert lines(backward(after, frozenset(), OUTPUT).steps) == [
        "forward projected",
        "forward residual",
        "replay graph of mlp_norm mlp_norm",
        "gather gathered mlp_norm",
        "gather gathered gradient of layer_output",
        "forward fc1",
        "replay graph of activation activation",
        *last,
    ]


def test_values_die_after_their_last_use() -> None:
    steps = backward(kind("llama-tiny").after, frozenset(), OUTPUT).steps
    died = {name: step for step in steps for name in step.frees}
    assert died["projected"].makes == ("residual",)
    assert died[gathered(gradient("layer_output"))].makes == (gradient("activation"),)
    for name in ("fc1", "activation", graph("activation")):  # the graph holds both
        assert died[name].makes == (gradient("fc1"),)
    assert died[gathered("mlp_norm")].makes == (gradient("mlp_norm"),)


def test_the_source_of_a_message_lives_until_the_message_is_waited_for() -> None:
    steps = forward(kind("llama-tiny").after, OUTPUT, frozenset())
    (died,) = (step for step in steps if "mlp_norm" in step.frees)
    assert died.makes == ("fc1",) and gathered("mlp_norm") in died.reads


def test_a_sum_and_its_norm_are_one_kernel_in_forward_alone() -> None:
    after = kind("llama-tiny").after
    fused = [step for step in forward(after, OUTPUT, frozenset()) if step.total is not None]
    assert [step.makes for step in fused] == [("residual", "mlp_norm")]
    assert not [step for step in backward(after, frozenset(), OUTPUT).steps if step.total is not None]


@pytest.mark.parametrize(
    ("value", "again"), [("residual", {"projected", "residual"}), ("fc1", {"fc1"}), ("mlp_norm", set())]
)
def test_what_is_rebuilt_for_one_value(value: str, again: set[str]) -> None:
    """A norm is replayed whatever is kept, so keeping its output saves nothing."""
    after = kind("llama-tiny").after
    saved = rebuilt(after, ()) - rebuilt(after, (value,))
    assert {name for operation in saved for name in operation.makes} == again


def test_a_forward_again_runs_no_more_than_what_slots_keep() -> None:
    after = kind("llama-tiny").after
    for kept, last in (({"residual"}, "residual"), ({"residual", "fc1"}, "fc1")):
        steps = forward(after, frozenset(kept), frozenset(kept))
        made = [name for step in steps if step.do == "forward" for name in step.makes]
        assert made[-1] == last


def test_heads_that_are_normed_are_kept_raw() -> None:
    assert (kind("llama-tiny").qkv_in_slot, kind("qwen3-tiny").qkv_in_slot) == ("heads", "qkv")
    for model in ("llama-tiny", "qwen3-tiny"):
        layer = kind(model)
        operations: list[Operation | None] = [
            step.operation for step in forward(layer.before, frozenset({layer.qkv_in_slot}), frozenset())
        ]
        assert (layer.heads in operations) == layer.heads.in_place


def test_without_norms_before_them_matrices_read_what_is_added_up() -> None:
    layer = kind("olmo-3-tiny")
    assert lines(forward(layer.before, frozenset({"qkv"}), frozenset())) == ["gather gathered input", "forward qkv"]
    assert lines(backward(layer.after, frozenset({"projected", "fc1", "mlp_out"}), OUTPUT).steps) == [
        "replay graph of attention_out_norm attention_out_norm",
        "forward residual",
        "replay graph of activation activation",
        "replay graph of mlp_out_norm mlp_out_norm",
        "backward gradient of mlp_out",
        "gather gathered gradient of mlp_out",
        "gather gathered residual",
        "backward gradient of activation",
        "backward gradient of fc1",
        "backward gradient of residual",
        "backward gradient of projected",
        "gather gathered gradient of projected",
        "backward gradient of attention_out",
    ]


def test_normed_outputs_that_are_kept_spare_their_products() -> None:
    """Norms around attention and MLP need what both matrices give; of these the residual is made by a sum."""
    after = kind("gemma-3-tiny").after
    made = {name for operation in rebuilt(after, ()) for name in operation.makes}
    assert made == {"projected", "residual", "fc1", "mlp_out"}
    assert {operation.makes for operation in rebuilt(after, {"projected", "fc1", "mlp_out"})} == {("residual",)}
