"""Machines from TOML files, and the table of known ones."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from memo.errors import ConfigError
from memo.estimate import hardware_files
from memo.estimate.hardware import Efficiency
from memo.estimate.hardware_files import HARDWARE, read_hardware

KNOWN_FILES = list(Path(hardware_files.__file__).parent.glob("machine_files/*.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "ours.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_fields_replace_those_of_the_machine_it_is_like(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'like = "h100-80"\nmemory_gib = 96\ngpus_per_node = 4\npeak_tflops.bf16 = 800\n[efficiency]\nmatmul = 0.7\n',
    )
    machine, base = read_hardware(path), HARDWARE["h100-80"]
    assert (machine.name, machine.memory_gib, machine.gpus_per_node) == ("ours", 96.0, 4)
    assert machine.peak_flops("bf16") == 800e12
    assert machine.peak_flops("fp64") == base.peak_flops("fp64")
    assert machine.efficiency.matmul == 0.7
    assert machine.efficiency.memory == base.efficiency.memory
    assert machine.network_gb_per_s == base.network_gb_per_s
    assert str(path) in machine.source


def test_a_file_with_a_link_of_its_own_has_not_the_lone_rate_of_another(tmp_path: Path) -> None:
    """Unless it gives one; a file that says nothing of the link has the same link."""
    same, other, given = (
        read_hardware(write(tmp_path, f'like = "h100-80"\n{more}')).alone_gb_per_s
        for more in ("", "offload_gb_per_s = 12\n", "prefetch_gb_per_s = 12\nalone_gb_per_s = 20\n")
    )
    assert (same, other, given) == (HARDWARE["h100-80"].alone_gb_per_s, 0, 20)


def test_the_peak_in_bf16_is_that_of_the_gpu_it_names_unless_it_is_given(tmp_path: Path) -> None:
    of_another = 'like = "h100-80"\ndriver_name = "NVIDIA L40S"\n'
    assert read_hardware(write(tmp_path, of_another)).peak_tflops["bf16"] == HARDWARE["l40s"].peak_tflops["bf16"]
    assert read_hardware(write(tmp_path, f"{of_another}peak_tflops.bf16 = 7\n")).peak_tflops["bf16"] == 7
    unknown = 'like = "h100-80"\ndriver_name = "NVIDIA Z9"\n'
    assert read_hardware(write(tmp_path, unknown)).peak_tflops == HARDWARE["h100-80"].peak_tflops


def test_a_file_with_all_fields_is_like_nothing(tmp_path: Path) -> None:
    (root,) = (path for path in KNOWN_FILES if "like" not in path.read_text(encoding="utf-8"))
    machine = read_hardware(write(tmp_path, root.read_text(encoding="utf-8")))
    assert machine == replace(HARDWARE[root.stem], name="ours")
    without_one = root.read_text(encoding="utf-8").replace("matmul = 0.83\n", "")
    with pytest.raises(ConfigError, match="there is no `like`"):
        read_hardware(write(tmp_path, without_one))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not exist: give the path of a TOML file, or one of a10, a100-40"):
        read_hardware(tmp_path / "none.toml")


@pytest.mark.parametrize("name", HARDWARE)
def test_known_machines_are_complete(name: str) -> None:
    machine = HARDWARE[name]
    assert machine.name == name
    assert machine.source
    assert machine.efficiency.source
    for share in fields(Efficiency):
        value = getattr(machine.efficiency, share.name)
        assert isinstance(value, str) or value > 0 or (share.name in ("hop_s", "host_kernel_s") and value == 0)
    assert {"bf16", "fp32", "fp64"} == set(machine.peak_tflops)


def test_every_fitted_number_is_named_in_its_source() -> None:
    for name in ("a800-80", "h100-94"):
        source = HARDWARE[name].efficiency.source
        assert "fitted" in source
        assert "matmul" in source
