"""Memory of layers that are swept along the sequence: records as plans count them."""

from itertools import product

import pytest
from memory_peaks import SWEEP, run_config

from memo.errors import ConfigError
from memo.estimate.rank_memory import rank_memory
from memo.estimate.swap_memory import (
    beside_slots,
    num_records,
    swap_bytes,
)
from memo.planner.swap import sweep_plans
from memo.spec.hidden_ops import stage_hidden_ops
from memo.spec.layer_ops import stage_ops, swept_ops
from memo.spec.schedule import pipeline_of
from memo.spec.shapes import shape_of
from memo.spec.slots import slot_layout
from memo.spec.stack import attending_layers, layers_with_attention_again, recomputing_layers
from memo.spec.sweep import key_value_layout

SCHEDULES = [
    *((1, 1, microbatches, order) for microbatches in (1, 2, 8) for order in ("depth_first", "breadth_first")),
    *((pp, 1, microbatches, "depth_first") for pp in (2, 4) for microbatches in (1, 3, 9)),
    *((pp, vpp, pp * rounds, "depth_first") for pp, vpp in ((2, 2), (2, 3), (3, 2)) for rounds in (1, 4)),
]


@pytest.mark.parametrize(("pp", "vpp", "microbatches", "order"), SCHEDULES)
def test_records_are_those_of_the_plans(pp: int, vpp: int, microbatches: int, order: str) -> None:
    """Exact, but inputs and hidden states, of which one too many may be counted (see the docstring of swap_memory)."""
    for layers, sections, again in product((1, 2, 3), (1, 3, 8), (0, 1, 3)):
        if again > layers:
            continue
        config = run_config(
            "gpt-tiny",
            pp=pp,
            vpp=vpp,
            gbs=microbatches,
            gradient_accumulation_order=order,
            num_layers=layers * pp * vpp,
            offload_alpha=0.0,
            offload_tiles=sections,
            offload_granularity="tile" if sections > 1 or again else "layer",
            offload_slot_tiles=1 if sections > 1 or again else None,
            recompute_attention_layers=again,
        )
        for stage in range(pp):
            pipeline = pipeline_of(config, pp)
            ops = stage_ops(pipeline, stage, config.model.num_layers)
            chosen = layers_with_attention_again(config)
            hidden = stage_hidden_ops(pipeline, stage, config.model.num_layers, sections)
            plan, beside = sweep_plans(swept_ops(ops, sections, chosen), hidden)
            if not config.memory.sweeps:
                layout = slot_layout(config, 0.0)
                slots = plan.num_slots * layout.slot_bytes + layout.workspace_bytes
                assert swap_bytes(config, pp, stage, 0.0).rounding_buffers == slots
            spare = num_records(config, pp, stage) - plan.num_records
            spare_keys = beside_slots(config, pp, stage).key_records - beside.keys.num_records
            if sections == 8:
                slides = config.override({"window_size": 1})
                assert key_value_layout(slides).slides
                keys = sweep_plans(swept_ops(ops, sections, chosen, keys_slide=True))[1].keys
                assert beside_slots(slides, pp, stage).key_records - keys.num_records == spare
            inputs = 0 if beside.inputs is None else beside.inputs.num_records
            turns_by_chance = vpp > 1 and microbatches == pp and stage == pp - 1
            assert spare == spare_keys == 0, (layers, sections, stage)
            if beside.hidden is not None and beside.evaluation is not None and config.memory.sweeps:
                moves = config.override({"offload_hidden_states": True})
                spare_hidden = beside_slots(moves, pp, stage).hidden_records - beside.hidden.num_records
                assert 0 <= spare_hidden <= (vpp > 1 and sections == 1), (layers, sections, stage)
                assert beside.hidden.num_slots + 1 == beside_slots(moves, pp, stage).hidden_sections
                assert beside.evaluation.num_records <= beside.hidden.num_records
                assert beside.evaluation.num_slots <= beside.hidden.num_slots
            assert 0 <= beside_slots(config, pp, stage).input_records - inputs <= (sections < 3 or turns_by_chance)


@pytest.mark.parametrize(("pp", "vpp", "microbatches", "order"), SCHEDULES)
def test_gated_delta_nets_have_no_records_of_keys_and_values(pp: int, vpp: int, microbatches: int, order: str) -> None:
    """Of a model whose every third layer attends, in chunks of as many layers as that: as of a plan of those alone."""
    for again in (0, 1, 3):
        config = run_config(
            "qwen3.5-tiny",
            pp=pp,
            vpp=vpp,
            gbs=microbatches,
            gradient_accumulation_order=order,
            num_layers=3 * pp * vpp,
            layer_types="linear,full,linear",
            offload_alpha=0.0,
            offload_tiles=4,
            offload_granularity="tile",
            offload_slot_tiles=1,
            recompute_attention_layers=again,
        )
        attending = attending_layers(config.model)
        for stage in range(pp):
            ops = stage_ops(pipeline_of(config, pp), stage, config.model.num_layers)
            _, beside = sweep_plans(swept_ops(ops, 4, layers_with_attention_again(config), attending))
            assert {step.op.layer for step in beside.keys.steps} == {op.layer for op in ops if op.layer % 3 == 1}
            spare = beside_slots(config, pp, stage).key_records - beside.keys.num_records
            assert spare == 0, (again, stage)


@pytest.mark.parametrize(
    ("window", "tiles", "held"),
    [
        (1, 64, 2),
        (4096, 64, 2),
        (16384, 64, 2),
        (16385, 64, 3),
        (100_000, 64, 8),
        (4096, 4, 4),
        (4096, 5, 2),
        (0, 64, 64),
    ],
)
def test_under_a_window_the_device_holds_no_more_keys_than_that_and_a_section(
    window: int, tiles: int, held: int
) -> None:
    """Of a million tokens, rounded up to sections; and the slots through which sections move."""
    seq_length = tiles << 14
    flags = {**SWEEP, "seq_length": seq_length, "offload_alpha": 0.0, "offload_tiles": tiles, "params_dtype": "bf16"}
    config = run_config("llama-tiny", **flags, window_size=window)
    found, whole = key_value_layout(config), key_value_layout(config.override({"window_size": 0}))
    assert found.held == held and found.slides == (held < tiles)
    assert whole.device_bytes == tiles * 3 * whole.part_bytes  # sums of gradients in fp32
    assert found.device_bytes == (held * 3 + 2 * found.slides) * found.part_bytes
    mixed = key_value_layout(config.override({"window_size": 1, "layer_types": "sliding,full"}))
    assert mixed.device_bytes == whole.device_bytes


def test_the_account_of_megatron_lm_refuses_sweeps() -> None:
    config = run_config("gpt-tiny", **SWEEP, offload_alpha=0.5)
    with pytest.raises(ConfigError, match="--offload-granularity tile: Megatron-LM's account"):
        rank_memory(config, shape_of(config.model, "", 1024), 1, 0)


@pytest.mark.parametrize(
    ("types", "chunks", "in_each", "expected"),
    [
        ("linear,linear,linear,full", 1, 3, {0, 1, 2}),
        ("linear,linear,linear,full", 1, 5, {0, 1, 2, 4, 5}),  # 6 is linear as well
        ("linear,linear,linear,full", 1, 7, {0, 1, 2, 3, 4, 5, 6}),
        ("full,linear,linear,full", 2, 2, {1, 2, 5, 6}),
        ("sliding,full", 2, 2, {0, 2, 4, 6}),
        ("full,sliding", 2, 2, {0, 1, 4, 5}),  # of a chunk the last layer comes last, whatever its attention takes
        ("full,sliding", 2, 4, set(range(8))),
        ("", 2, 1, {0, 4}),
    ],
)
def test_the_layers_with_the_cheapest_attention_recompute_it(
    types: str, chunks: int, in_each: int, expected: set[int]
) -> None:
    name = "qwen3.5-tiny" if "linear" in types else "llama-tiny"
    window = {"window_size": 16} if "sliding" in types else {}
    model = run_config(name, num_layers=8, layer_types=types, **window).model
    assert recomputing_layers(model, chunks, in_each) == expected
