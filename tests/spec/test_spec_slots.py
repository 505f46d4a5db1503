"""The layout of a rounding buffer, checked byte by byte: no tensor overlaps another, and what moves is a prefix."""

import itertools

import pytest

from memo.config import RunConfig, preset
from memo.config.training import Dtype
from memo.spec.skeleton import SlotDims, bytes_of, moves_in_part, skeletal_tensors
from memo.spec.slots import SLOT_ALIGNMENT_BYTES, SlotLayout, plan_slot, slot_layout

TILES = 4
MODELS = [
    ("gpt-tiny", 512, 1, 1, "bf16"),
    ("llama-tiny", 512, 3, 2, "fp32"),
    ("qwen3-tiny", 768, 1, 2, "fp64"),
    ("gpt2-tiny", 40, 1, 1, "bf16"),  # log-sum-exp, 640 bytes, needs padding
]


@pytest.mark.parametrize(("name", "tokens", "batch", "tp", "dtype"), MODELS)
def test_every_choice_of_tiles_is_laid_out_without_overlap(
    name: str, tokens: int, batch: int, tp: int, dtype: Dtype
) -> None:
    skeleton = skeletal_tensors(preset(name))
    dims = SlotDims(tokens, batch, tp, TILES, dtype)
    for qkv, fc1, norm in itertools.product((0, 1, TILES), (0, 3, TILES), (0, 2)):
        moved = {"qkv": qkv, "fc1": fc1, "norm": norm}
        layout = plan_slot(skeleton, dims, moved)
        check_bytes(layout)
        for tensor in skeleton:
            whole = bytes_of(tensor, dims)
            place, count = layout.places.get(tensor.name), moved.get(tensor.group, 0)
            if tensor.kind == "always":
                assert place is not None and place.num_bytes == whole and place.saved_rows == place.shape[0]
            elif not count:
                assert place is None and layout.saved_rows(tensor.name) == 0
            else:
                assert place is not None and place.saved_rows * TILES == count * rows_of(tensor.layout, dims)
                assert place.num_bytes == (whole if tensor.name == "qkv" else whole * count // TILES)
        if not qkv:
            assert layout.workspace is not None and layout.places.get("qkv") is None
            (of_qkv,) = (bytes_of(t, dims) for t in skeleton if t.name == "qkv")
            assert layout.workspace_bytes == of_qkv
        else:
            assert layout.workspace_bytes == 0
        assert layout.buffer_bytes(2) == 2 * layout.slot_bytes + layout.workspace_bytes


def rows_of(layout: str, dims: SlotDims) -> int:
    return dims.tokens // dims.tp if layout == "tokens" else dims.tokens


def check_bytes(layout: SlotLayout) -> None:
    """Walks through the slot from its first byte: gaps are padding alone, and saved rows come before all others."""
    end = saved_end = 0
    for place in layout.places.values():
        assert end <= place.offset_bytes < end + SLOT_ALIGNMENT_BYTES and place.offset_bytes % SLOT_ALIGNMENT_BYTES == 0
        assert saved_end == end, "something that does not move lies before something that does"
        end = place.offset_bytes + place.num_bytes
        saved_end = place.offset_bytes + place.num_bytes * place.saved_rows // place.shape[0]
    assert (layout.slot_bytes, layout.moved_bytes) == (end, saved_end)


@pytest.mark.parametrize("policy", ["auto", "paper"])
@pytest.mark.parametrize(("alpha", "tiles"), [(0.0, 0), (0.3, 3), (0.39, 3), (1.0, 10)])  # 0.3 x 10 is 2.99..96
def test_a_share_moves_whole_tiles_of_every_group_of_the_policy(alpha: float, tiles: int, policy: str) -> None:
    config = RunConfig(model=preset("llama-tiny")).override(
        {
            "seq_length": 2560,
            "tp": 2,
            "cp": 2,
            "mbs": 3,
            "offload_tiles": 10,
            "offload_policy": policy,
            "device": "cuda",
        }
    )
    skeleton = skeletal_tensors(config.model)
    groups = [t.group for t in skeleton if t.kind != "always" and moves_in_part(t, policy)]  # type: ignore[arg-type]
    dims = SlotDims(tokens=1280, batch=3, tp=2, tiles=10, dtype="bf16")
    assert slot_layout(config, alpha) == plan_slot(skeleton, dims, dict.fromkeys(groups, tiles))
    assert slot_layout(config, dict.fromkeys(groups, tiles)) == slot_layout(config, alpha)
