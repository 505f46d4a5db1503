"""Plans with a node's local disks: how much longer sequences get, what the simulator charges, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memo.cli.plan import main
from memo.config.derived import SWEPT_TOKENS
from memo.errors import ConfigError
from memo.estimate.disks import NVME_GB_PER_S
from memo.estimate.verdict import Verdict
from memo.search.candidates import AUTO, Layout, config_of
from memo.search.launch import run_of
from memo.search.plan import Plan
from memo.search.planning import plan
from memo.search.question import Question, ask
from memo.search.ranking import evaluate
from memo.search.sizing import size
from memo.search.sweeping import sweeps
from memo.search.tables import Commands, as_object, text
from memo.simulate.predict import predict_step
from memo.units import GIB

TERABYTE_GIB = 1e12 / GIB
NODE: dict[str, Any] = {"gpus": 8, "hardware": "h100-80", "host_memory_gib": 2048}
CARD: dict[str, Any] = {"gpus": 1, "hardware": "a100-40", "gpu_memory_gib": 24, "host_memory_gib": 128}


def longest(**options: Any) -> Plan:
    return plan("llama-3.1-8b", objective="max-seq-len", **options)


def test_a_node_with_four_terabytes_holds_eight_million_tokens() -> None:
    found = longest(**NODE, nvme_gib=4 * TERABYTE_GIB)
    assert found.longest is not None and found.best is not None
    assert found.longest.seq_len >= 8 << 20
    sized = found.best.sized
    assert sized.verdict == Verdict.FITS and 0 < sized.disk_bytes <= 0.9 * 4e12
    assert sized.host_bytes <= 0.9 * 2048 * GIB
    assert found.best.step.resources["disk"] < found.best.step.resources["compute"]
    shown = text(found, Commands())
    assert "NVMe 3,725.29 GiB at 2 GB/s a node" in shown and "NVMe GiB" in shown
    assert "GiB of NVMe, 1,843.2 GiB sure to fit" in found.longest.limit
    assert as_object(found, Commands())["choices"][0]["nvme_gib"] == sized.disk_bytes / GIB


def test_one_card_of_24_gib_with_a_terabyte_holds_128_thousand_tokens() -> None:
    """Without clipping: with it the states alone, and gradients that wait for their norm, need 121.6 GiB of 115.2."""
    options = {**CARD, "global_batch_size": 1, "clip_grad": 0.0}
    found, before = longest(**options, nvme_gib=TERABYTE_GIB), longest(**options)
    assert found.longest is not None and before.longest is not None and found.best is not None
    assert found.longest.seq_len >= 128 << 10 > before.longest.seq_len
    assert found.best.sized.verdict == Verdict.FITS and found.best.sized.disk_bytes > 0
    assert run_of(found.question, found.best).training.clip_grad == 0.0


def asked(seq_len: int, **options: Any) -> Question:
    return ask("llama-3.1-8b", **NODE, seq_len=seq_len, **options)


def test_what_fits_in_host_memory_needs_no_disk() -> None:
    with_disk, without = asked(1 << 20, nvme_gib=1000), asked(1 << 20)
    layout = Layout(tp=8)
    for question in (with_disk, without):
        choice = evaluate(question, layout, AUTO)
        assert choice.sized.disk_bytes == 0 and "disk" not in choice.step.resources
        assert run_of(question, choice).memory.offload_nvme_path is None
    assert evaluate(with_disk, layout, AUTO).step == evaluate(without, layout, AUTO).step


def test_host_and_disk_together_hold_all_records() -> None:
    question = asked(6 << 20, nvme_gib=4000)
    swept = next(sweeps(question, Layout(tp=8), 0.0, SWEPT_TOKENS[-1:]))
    on_disk = size(question, Layout(tp=8), swept)
    in_memory = size(asked(6 << 20), Layout(tp=8), swept)
    assert (in_memory.verdict, on_disk.verdict) == (Verdict.OOHM, Verdict.FITS)
    assert on_disk.memory.allocated == in_memory.memory.allocated
    staging = on_disk.host_bytes + on_disk.disk_bytes - in_memory.host_bytes
    assert 0 < staging < 0.01 * in_memory.host_bytes
    less = size(asked(6 << 20, nvme_gib=500), Layout(tp=8), swept)
    assert (
        less.verdict == Verdict.OOHM
        and less.host_bytes > on_disk.host_bytes
        and "GiB of NVMe" in less.shortage(question)
    )


def test_a_slow_disk_holds_compute_up_and_its_rate_is_the_nodes() -> None:
    fast = asked(6 << 20, nvme_gib=4000, nvme_gb_per_s=20)
    swept = next(sweeps(fast, Layout(tp=8)))
    config = config_of(fast, Layout(tp=8), swept)
    hidden = predict_step(config, 8, fast.hardware, 0.0)
    steps = [
        predict_step(config, 8, replace(fast.hardware, nvme_gb_per_s=rate), 0.0) for rate in (20.0, 2.0, 0.05, 0.025)
    ]
    assert steps[0] == hidden and hidden.hidden_share == 1
    disk_s = [step.resources["disk"] for step in steps]
    assert disk_s[1] == pytest.approx(10 * disk_s[0]) and disk_s[3] == pytest.approx(2 * disk_s[2])
    assert steps[1].step_time_s == pytest.approx(hidden.step_time_s, rel=1e-3)
    assert steps[3].step_time_s > steps[2].step_time_s > 1.5 * hidden.step_time_s
    assert steps[3].binding == "disk" and steps[3].step_time_s >= disk_s[3]


def test_the_run_names_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    argv = ["--model", "llama-3.1-8b", "--gpus", "8", "--hardware", "h100-80", "--host-memory-gib", "2048"]
    argv += ["--gbs", "8", "--seq-len", str(6 << 20), "--nvme-gib", "4000"]
    argv += ["--nvme-path", "/scratch", "--out", str(file)]
    main(argv)
    assert "GiB of a node's disks." in file.read_text()
    assert 'offload_nvme_path = "/scratch"' in file.read_text() and "offload_nvme_gib = 3600.0" in file.read_text()


def test_a_rate_is_assumed_and_can_be_given() -> None:
    assert asked(8192, nvme_gib=10).hardware.nvme_gb_per_s == NVME_GB_PER_S
    assert asked(8192, nvme_gib=10, nvme_gb_per_s=7).hardware.nvme_gb_per_s == 7
    with pytest.raises(ConfigError, match="--nvme-gb-per-s 7 is of a disk, but --nvme-gib is not given: give both"):
        asked(8192, nvme_gb_per_s=7)
    with pytest.raises(ConfigError, match="--nvme-gib"):
        asked(8192, nvme_gib=-1)
