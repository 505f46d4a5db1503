"""docs/hardware.md names every field that a hardware file may have."""

from dataclasses import fields
from pathlib import Path

from memo.estimate.hardware import Efficiency, Hardware

PAGE = Path(__file__).parents[2] / "docs" / "hardware.md"


def test_every_field_of_a_hardware_file_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in [field.name for section in (Hardware, Efficiency) for field in fields(section)]:
        shown = {"peak_tflops": "`peak_tflops.bf16`", "efficiency": "`[efficiency]`"}.get(name, f"`{name}`")
        assert shown in text, f"docs/hardware.md does not explain {name}"
