"""Triton's compiler and NVIDIA's assembler make machine code of every kernel, without a GPU.

Numbers are those of Triton's interpreter (the other tests of this folder), times are not known."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from memo_kernels.ops import _FOLDERS


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(each, marks=pytest.mark.full) for each in (80, 89, 100, 120))]
)
def test_every_kernel_compiles_and_keeps_its_values_in_registers(tmp_path: Path, capability: int) -> None:
    """Of A100, RTX 4090, H100, B200 and RTX 5090. A spilled register would cost traffic that no kernel counts on."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DUMP_PTXAS_LOG": "1"}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(capability)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    compiled = re.findall(r"^memo_kernels\.(\w+)\.triton\.(\w+) of .*$", done.stdout, re.MULTILINE)
    assert {folder for folder, _ in compiled} == set(_FOLDERS.values())
    assert len({*compiled}) == 9, compiled
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stdout)
    assert len(spilled) >= len({*compiled}) and set(spilled) == {("0", "0")}
