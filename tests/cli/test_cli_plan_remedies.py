"""What would fit where nothing does."""

import json
import re

import pytest
from plan_answers import printed

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("flags", ["--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "--clip-grad 0"])
def test_a_model_whose_states_fill_the_host_memory_fits_with_less_of_them(flags: str, capsys: Capture) -> None:
    """gpt-oss-20b on one GPU of a node with 256 GiB: 12 bytes a parameter in host memory instead of 16."""
    asked = ["--model", "gpt-oss-20b", "--seq-len", "128K", "--gpus", "1", "--gpu", "h100-80"]
    asked += ["--host-memory-gib", "256", "--json"]
    found = json.loads(printed(asked, capsys))
    assert found["choices"] == [] and flags in found["would_fit"]
    found = json.loads(printed([*asked, *flags.split()], capsys))
    best = found["choices"][0]
    assert best["verdict"] == "fits" and 190 < best["host_gib"] < 0.9 * 256
    assert re.search(f" {flags}[ .]", found["command"])


@pytest.mark.full
def test_the_longest_that_would_fit_is_one_beyond_which_nothing_does(capsys: Capture) -> None:
    """Without moving states 1,245,184 tokens fit, and 3M do with them."""
    asked = "--model llama-3.1-8b --gpus 2 --hardware h100-80 --host-memory-gib 2048 --top 1"
    argv = asked.split()
    found = json.loads(printed([*argv, "--seq-len", "16M", "--json"], capsys))
    flag, tokens = found["would_fit"][0].split()
    assert found["choices"] == [] and flag == "--seq-len" and int(tokens) > 3 << 20
    assert json.loads(printed([*argv, flag, tokens, "--json"], capsys))["choices"]
    assert not json.loads(printed([*argv, flag, str(int(tokens) + (1 << 20)), "--json"], capsys))["choices"]
