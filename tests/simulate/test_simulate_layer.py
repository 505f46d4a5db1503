"""The cost of a layer: which products, bytes and collectives are in it, and what hides."""

from dataclasses import replace

import pytest
from frameworks import FSDP

from memo.config import RunConfig, preset
from memo.config.derived import resident_tiles
from memo.estimate.hardware import Hardware
from memo.estimate.hardware_files import HARDWARE
from memo.simulate.attention import attention_cost
from memo.simulate.framework import MEMO, Framework
from memo.simulate.kernels import Group, Kernels
from memo.simulate.layer import plain_layer, swapped_layer
from memo.simulate.layer_shape import LayerShape
from memo.spec.flops import model_flops_per_token

IDEAL = replace(
    HARDWARE["a800-80"],
    efficiency=replace(
        HARDWARE["a800-80"].efficiency,
        matmul=1.0,
        matmul_half_size=0,
        attention_forward=1.0,
        attention_backward=1.0,
        kernel_s=0,
        collective_s=0,
    ),
)
"""Products and attention at the peak, so that seconds count FLOPs."""


MADE_AGAIN = ((4096, 2), (16384, 2))
"""Width and passes of a GPT 7B's norm and activation."""


def config(model: str = "llama-3.1-8b", **values: object) -> RunConfig:
    base = {"seq_length": 65536, "offload_alpha": "off", "device": "cuda"}
    return RunConfig(model=preset(model)).override({**base, **values})


def kernels(hardware: Hardware = IDEAL) -> Kernels:
    return Kernels(hardware, "bf16")


@pytest.mark.parametrize("model", ["gpt-7b", "llama-3.1-8b"])
@pytest.mark.parametrize("layout", [{}, {"tp": 4}, {"cp": 4}, {"tp": 2, "cp": 2, "mbs": 2}])
def test_products_and_attention_are_the_model_flops(model: str, layout: dict[str, int]) -> None:
    run = config(model, **layout)
    layer = plain_layer(run, kernels())
    shape, s = run.model, run.data.seq_length
    head = 6 * shape.hidden_size * shape.vocabulary
    flops = (model_flops_per_token(shape, s) - head) / shape.num_layers * s * run.training.micro_batch_size
    seconds = flops / (run.parallel.tp * run.parallel.cp) / 312e12
    both = layer.forward + layer.backward
    assert both.matmul + both.attention == pytest.approx(seconds)
    assert layer.backward.matmul == pytest.approx(2 * layer.forward.matmul)


@pytest.mark.parametrize("framework", [MEMO, FSDP])
def test_recomputation_adds_what_is_made_again(framework: Framework) -> None:
    """Under autograd the whole forward; memo's executor leaves out fc2 and what its backward makes again anyway."""
    run, flat = config(tp=2, cp=2), replace(framework, host_starts_kernels=False)
    none, full, selective = (
        plain_layer(run.override({"recompute_granularity": kind}), kernels(), flat)
        for kind in ("none", "full", "selective")
    )
    attention = attention_cost(LayerShape(run, kernels()), backward=False)
    assert selective.backward.total_s == pytest.approx(none.backward.total_s + attention.total_s)
    again = full.backward.total_s - none.backward.total_s
    if framework is FSDP:
        assert again == pytest.approx(none.forward.total_s)
    else:
        swapped = swapped_layer(config(tp=2, cp=2, offload_alpha=0.0, offload_tiles=1), kernels(), flat)
        groups_s = sum(cost.total_s for cost in swapped.recompute.values())
        assert again == pytest.approx(groups_s + attention.total_s) and again < none.forward.total_s


def test_without_a_swap_plan_a_layer_takes_what_it_takes_on_as_many_tiles_without_its_copies() -> None:
    run = config(tp=2)
    plain = plain_layer(run, kernels())
    swapped = swapped_layer(run.override({"offload_alpha": 1.0, "offload_tiles": resident_tiles(run)}), kernels())
    assert plain.backward == swapped.backward and plain.forward.total_s < swapped.forward.total_s


def test_a_swapped_layer_recomputes_the_products_of_its_groups() -> None:
    """qkv, projection and fc1: 3 + 1 + 4 of the 12 h^2 weights of a GPT; fc2 is never repeated."""
    run = config("gpt-7b", tp=2, offload_alpha=0.0)
    plain, swapped = plain_layer(run, kernels()), swapped_layer(run, kernels())
    assert swapped.forward.matmul == pytest.approx(plain.forward.matmul)
    again = sum(cost.matmul for cost in swapped.recompute.values())
    assert again == pytest.approx(plain.forward.matmul * 8 / 12)
    assert sum(cost.attention for cost in swapped.recompute.values()) == 0.0
    assert list(swapped.recompute) == ["qkv", "residual", "fc1"]
    paper = swapped_layer(config("gpt-7b", tp=2, offload_alpha=0.0, offload_policy="paper"), kernels())
    assert set(paper.recompute) == {"qkv", "residual", "fc1", "norm", "activation"}


def test_collectives_of_tp_wait_where_nothing_hides_them() -> None:
    """Under autograd four forward, and backward two of row-parallel matrices; those of column-parallel ones under two
    products."""
    run = config("gpt-7b", tp=4)
    one_s = kernels().gather_s(65536 * 4096 * 2, Group(4, 1))
    layer = plain_layer(run, kernels(), FSDP)
    assert layer.forward.tensor == pytest.approx(4 * one_s)
    assert layer.backward.tensor == pytest.approx(2 * one_s)
    slow = plain_layer(run, kernels(replace(IDEAL, node_gb_per_s=IDEAL.node_gb_per_s / 1000)), FSDP)
    # Nothing hides any more but what the products themselves take.
    both = slow.forward.tensor + slow.backward.tensor
    columns = 2 * (3 + 4) / 24 * layer.backward.matmul * 2 / 2
    assert both == pytest.approx(10 * 1000 * one_s - 2 * columns, rel=0.02)
    assert plain_layer(config("gpt-7b"), kernels()).forward.tensor == pytest.approx(0.0, abs=1e-12)


def test_a_swapped_backward_gathers_each_input_once_and_beside_its_work() -> None:
    """Two gradients are gathered beside little or nothing, fc1's inputs alone where fc1 waits for them."""
    run, tokens = config("gpt-7b", tp=4, offload_alpha=0.0, offload_tiles=8), 65536 // 8
    one_s = 8 * kernels().gather_s(tokens * 4096 * 2, Group(4, 1))
    norm_s, activation_s = (8 * kernels().memory_s(2 * tokens * width * passes / 4) for width, passes in MADE_AGAIN)
    beside_s = norm_s + activation_s
    assert 0.0 < beside_s < one_s
    layer = swapped_layer(run, kernels())
    assert layer.backward.tensor == pytest.approx(one_s + one_s - beside_s)
    # The sum that is made again is scattered, and fc1 waits for its inputs, which nothing hides any more.
    after_s = layer.recompute["residual"].tensor + layer.recompute["fc1"].tensor
    assert after_s == pytest.approx(one_s + beside_s)
    assert layer.recompute["qkv"].tensor == pytest.approx(one_s)
    slow = kernels(replace(IDEAL, node_gb_per_s=IDEAL.node_gb_per_s / 1000))
    assert swapped_layer(run, slow).backward.tensor == pytest.approx(6 * 1000 * one_s, rel=0.02)
    assert swapped_layer(config("gpt-7b", offload_alpha=0.0), kernels()).backward.tensor == 0.0


def test_ring_messages_hide_under_attention() -> None:
    hidden = attention_cost(LayerShape(config(cp=4), kernels()), backward=False)
    assert hidden.context == 0.0
    slow = replace(IDEAL, node_gb_per_s=0.01)
    exposed = attention_cost(LayerShape(config(cp=4), kernels(slow)), backward=False)
    message_s = 65536 / 4 * 2 * 1024 * 2 / (slow.node_gb_per_s * 1e9 * slow.efficiency.node)
    assert exposed.context == pytest.approx(3 * (message_s - exposed.attention / 4))


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_every_kind_of_context_parallelism_computes_the_same_attention(kind: str) -> None:
    run = config("gpt-7b", cp=4, cp_comm_type=kind)
    alone = attention_cost(LayerShape(config("gpt-7b"), kernels()), backward=True)
    cost = attention_cost(LayerShape(run, kernels()), backward=True)
    assert cost.attention == pytest.approx(alone.attention / 4)
    assert cost.context > 0.0
    assert cost.elementwise > 0.0
    assert (alone.context, alone.elementwise) == (0.0, 0.0)


@pytest.mark.parametrize(("kind", "messages"), [("all_gather", (1, 2)), ("a2a", (2, 2))])
def test_swept_layers_meet_over_cp_tile_by_tile(kind: str, messages: tuple[int, int]) -> None:
    """Each tile has messages of its own; keys and values that were exchanged in forward are not sent again."""
    slow = replace(IDEAL, efficiency=replace(IDEAL.efficiency, collective_s=1e-3))
    run = config("gpt-7b", cp=4, cp_comm_type=kind, offload_alpha=0.0, offload_tiles=16)
    whole = swapped_layer(run, kernels(slow))
    swept = swapped_layer(run.override({"offload_granularity": "tile"}), kernels(slow))
    kv_s = kernels().all_to_all_s(65536 / 4 * 2 * 4096 * 2, Group(4, 1)) if kind == "a2a" else 0.0
    assert swept.forward.context - whole.forward.context == pytest.approx(15 * messages[0] * 1e-3)
    assert swept.backward.context - whole.backward.context == pytest.approx(15 * messages[1] * 1e-3 - kv_s)


@pytest.mark.parametrize("kind", ["all_gather", "a2a"])
def test_attention_that_is_recomputed_leaves_gathered_keys_to_its_backward(kind: str) -> None:
    """So keys and values are gathered twice in all, while heads are exchanged in each forward."""
    run = config("gpt-7b", cp=4, cp_comm_type=kind, offload_alpha=0.0, offload_granularity="tile")
    layer = swapped_layer(run.override({"recompute_attention_layers": run.model.num_layers}), kernels())
    expected = 0.0 if kind == "all_gather" else layer.forward.context
    assert layer.attention_again.context == pytest.approx(expected, abs=1e-12)
    assert layer.attention_again.attention == layer.forward.attention


def test_tiles_cost_kernels_and_small_products() -> None:
    small = config("gpt-7b", seq_length=8192, tp=8, offload_alpha=0.0)
    few, many = (swapped_layer(small.override({"offload_tiles": n}), kernels(HARDWARE["a800-80"])) for n in (1, 8))
    assert many.forward.total_s > few.forward.total_s
