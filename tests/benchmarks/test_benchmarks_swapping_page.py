"""docs/swapping.md shows what the code prints, and what it points to is there."""

import re
from pathlib import Path

import pytest
from swap_drawing import draw_text
from swap_plans import plan_stages, simulate_swaps, stage_table

from memo.simulate.streams import LayerTimes
from memo.spec.schedule import Pipeline

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "swapping.md").read_text(encoding="utf-8")


def test_the_timeline_of_four_layers_is_the_printed_one() -> None:
    (stage,) = plan_stages(Pipeline(stages=1, chunks=1, microbatches=1), num_layers=4)
    drawn = draw_text(simulate_swaps(stage.plan, LayerTimes(1.0, 2.0, 1.0, 2.0)), width=96)
    assert f"```\n{drawn}\n```" in PAGE


def test_the_table_of_stages_is_the_printed_one() -> None:
    stages = plan_stages(Pipeline(stages=4, chunks=1, microbatches=8), num_layers=16)
    assert f"```\n{stage_table(stages, record_bytes=2**30)}\n```" in PAGE


def test_the_examples_are_python() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        compile(example, "docs/swapping.md", "exec")
        for line in example.splitlines():
            if line.startswith("from "):
                exec(line, {})


@pytest.mark.parametrize("pattern", [r"!\[.*?\]\((.*?)\)", r"`((?:benchmarks|tests|memo)/[\w/]+\.py)`"])
def test_images_and_files_exist(pattern: str) -> None:
    found = re.findall(pattern, PAGE)
    assert found
    missing = [name for name in found if not ((ROOT / name).exists() or (ROOT / "docs" / name).exists())]
    assert missing == []
