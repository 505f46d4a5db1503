"""disk_records.py moves every byte through the engine, and leaves nothing behind."""

from pathlib import Path

import disk_records as benchmark


def test_a_row_has_both_sides(tmp_path: Path) -> None:
    row = benchmark.measure(tmp_path, num_records=5, record_bytes=1 << 16, repeats=2)
    assert row["ratio"] == row["disk_s"] / row["step_s"] > 0
    assert len(row["steps_s"]) == row["repeats"] == 2
    assert not list(tmp_path.iterdir())


def test_a_step_moves_all_records_there_and_back(tmp_path: Path) -> None:
    engine = benchmark.Engine(tmp_path, 5, 1 << 16)
    with engine.swapper.recorded() as recorder:
        engine.step_s()
    spans = recorder.spans()
    for row in ("offload", "prefetch"):
        assert sum(span.num_bytes for span in spans if span.row == row) == 5 << 16 == engine.file.num_bytes
    engine.close()
