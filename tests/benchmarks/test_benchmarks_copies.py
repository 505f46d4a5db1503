"""Records of copies.py are those of a run, and its rates come from the streams that copied."""

import copies
import page_gpu
import pytest
import torch
from measure import case_of
from scales import SMOKE, Arguments

CPU = torch.device("cpu")
ARGS = Arguments(SMOKE, float("inf"))


def test_a_record_is_what_one_layer_moves() -> None:
    """gpt-tiny on one of two tensor-parallel ranks, fp32, h = 128: half of the tokens of all that may move in part."""
    case = case_of(ARGS, "memo", SMOKE.rank, 512, world=SMOKE.world)
    tokens, element, hidden, heads = 512, 4, 128, 4
    always = tokens * hidden * element // 2 * 2 + tokens * heads // 2 * element  # input, attention's output; lse
    split = (3 + 4 + 4) * tokens * hidden * element // 2  # qkv, fc1, activation
    sharded = 3 * tokens // 2 * hidden * element  # two norms, residual
    assert copies.record_bytes_of(case, 0.0) == always
    assert copies.record_bytes_of(case, 1.0) == always + split + sharded
    assert copies.record_bytes_of(case, 0.5) == always + (split + sharded) // 2
    assert copies.sizes(ARGS) == {always + (split + sharded) // 2: (512, 0.5), 2367488: (1024, 0.5)}


def test_every_rate_has_its_column() -> None:
    row = {"status": "ok", "seq_length": 512, "alpha": 0.5, "record_bytes": 1 << 30}
    found = copies.rates(1 << 16, CPU)
    cells = {head: cell({**row, **found}) for head, cell in page_gpu.TABLES["copies"][1].items()}
    assert "-" not in cells.values() and cells["record, GiB"] == "1.00"
    assert all(value > 0 for value in found.values() if not isinstance(value, str))


def test_a_record_that_the_host_does_not_hold_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "available_host_bytes", lambda: 1 << 10)
    row = copies.rates(1 << 20, CPU)
    assert row["status"] == "oom" and "2 records x 1.00 MiB" in row["message"]
