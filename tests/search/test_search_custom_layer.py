"""Plans for a custom layer: memo's own layer, written as one, is planned nearly as fast; what cannot be asked."""

import pytest
from custom_layers import ADAPTED, PARALLEL, PLAIN

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
    with pytest.raises(ConfigError, match=r"fights with --objective max-model-size.*ask for tgs or max-seq-len"):
        memo.plan("gpt-7b", gpus=2, objective="max-model-size", custom_layer=PARALLEL)
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt-7b", "--gpus", "2", "--custom-layer", "nowhere.py:Layer"])
    assert "--custom-layer nowhere.py:Layer cannot be loaded" in capsys.readouterr().err
