"""Plans for a custom layer: memo's own layer, written as one, is planned nearly as fast; what cannot be asked."""

from pathlib import Path

import pytest
from custom_layers import ADAPTED, PARALLEL, PLAIN, SANDWICH, SandwichLayer
from processes import alone

import memo
from memo.cli.main import main
from memo.errors import ConfigError
from memo.search.candidates import grids
from memo.search.launch import command, run_of

MOST_SLOWER = 0.07
"""Its halves run again in backward."""


def test_a_plan_of_a_custom_layer() -> None:
    own, custom = (
        memo.plan("llama-3.1-8b", gpus=2, seq_len=131072, hardware="h200", top=1, custom_layer=layer)
        for layer in ("", PLAIN)
    )
    assert own.best is not None and custom.best is not None
    assert custom.question.model.shape.parameters == own.question.model.shape.parameters
    assert 1 - MOST_SLOWER <= custom.best.step.tgs / own.best.step.tgs <= 1.0
    assert run_of(custom.question, custom.best).model.custom_layer == PLAIN
    assert f"--custom-layer {PLAIN}" in command(custom.question, custom.best)


def test_tensor_parallelism_that_its_matrices_do_not_divide_by_is_no_candidate() -> None:
    question = memo.plan("llama-3.1-8b", gpus=8, seq_len=8192, hardware="h200", top=1, custom_layer=ADAPTED).question
    refused = {layout.tp for layout, why in grids(question) if "narrow.weight has 6 rows" in why}
    assert refused == {4, 8}


def test_what_cannot_be_asked_of_a_custom_layer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"conflicts with --objective max-model-size.*ask for tgs or max-seq-len"):
        memo.plan("gpt-7b", gpus=2, objective="max-model-size", custom_layer=PARALLEL)
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt-7b", "--gpus", "2", "--custom-layer", "nowhere.py:Layer"])
    assert "--custom-layer nowhere.py:Layer cannot be loaded" in capsys.readouterr().err


def test_the_class_itself_may_be_given() -> None:
    """By a name that every process of a run finds it by."""
    asked = {"gpus": 2, "seq_len": 8192, "hardware": "h200", "top": 1}
    given, named = (memo.plan("llama-3.1-8b", custom_layer=layer, **asked) for layer in (SandwichLayer, SANDWICH))
    assert given.question.model.sizes.custom_layer == "custom_layers:SandwichLayer"
    assert given.best is not None and named.best is not None and given.best.step.tgs == named.best.step.tgs

    class Inside(SandwichLayer):
        pass

    with pytest.raises(ConfigError, match=r"Inside is a class inside of a function or a class: define it at the top"):
        memo.plan("llama-3.1-8b", custom_layer=Inside, **asked)
    again = type("SandwichLayer", (SandwichLayer,), {"__module__": "custom_layers", "__qualname__": "SandwichLayer"})
    with pytest.raises(
        ConfigError, match=r"custom_layers:SandwichLayer is another class than the one given: give each"
    ):
        memo.plan("llama-3.1-8b", custom_layer=again, **asked)
    with pytest.raises(ConfigError, match=r"names Path, which is no memo.CustomLayer"):
        memo.plan("llama-3.1-8b", custom_layer=Path, **asked)


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import memo
from custom_layers import SandwichLayer

class Mine(SandwichLayer):
    pass

if __name__ == "__main__":
    fields = dict(mock_data=True, seq_length=64, gbs=1, train_iters=1, num_threads=1, progress=False, save=sys.argv[2])
    with memo.Trainer("gpt-tiny", custom_layer=Mine, **fields) as trainer:
        trainer.train()
"""


def test_a_class_of_a_script_is_found_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    arguments = [str(Path(__file__).parents[1] / "support"), str(tmp_path / "run")]
    with alone(tmp_path, ("file", str(tmp_path / "mine.py")), arguments) as run:
        assert run.ended(0).status == 0, run.errors(0)
    assert f'custom_layer = "{tmp_path / "mine.py"}:Mine"' in (tmp_path / "run" / "config.toml").read_text()
