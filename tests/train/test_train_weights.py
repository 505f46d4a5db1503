"""Which weights a run starts from: a plan's directory counts, missing ones are refused, and every header says it."""

import shutil
from pathlib import Path

import pytest
from hf_directories import write_model

import memo
from memo.cli.main import main
from memo.config.flags import parse_run

SMALL = ["--device", "cpu", "--dtype", "fp32", "--num-threads", "1", "--peak-tflops", "1", "--no-progress"]
SMALL += ["--train-iters", "1", "--mock-data"]
NEW = ["--pretrained-checkpoint", "None"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 97 tokens with its weights."""
    pytest.importorskip("transformers")
    return write_model("llama", tmp_path_factory.mktemp("published"))


@pytest.fixture
def bare(published: Path, tmp_path: Path) -> Path:
    """Its config.json alone, which is all that a plan needs."""
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(published / "config.json", folder)
    return folder


def planned(model: Path, folder: Path) -> list[str]:
    """The flags that train as a plan for one GPU says, on this machine."""
    run = folder / "run.toml"
    assert main(["plan", "--model", str(model), "--gpus", "1", "--seq-len", "128", "--out", str(run)]) == 0
    return ["--config", str(run), *SMALL]


def first_loss(flags: list[str]) -> float:
    with memo.Trainer(config=parse_run(flags, prog="memo train")) as made:
        made.print_header()
        return made.step().lm_loss


def test_a_plan_of_a_directory_starts_from_its_weights(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = planned(published, tmp_path)
    assert f"\nweights: from {published}; by default --lr 1e-05 after a warm-up of 1/10 of the steps\n" in (
        capsys.readouterr().out
    )
    given = first_loss(flags)
    assert f"\nweights: from {published}\n" in capsys.readouterr().out
    assert given == pytest.approx(first_loss(["--model", str(published), "--seq-len", "128", *SMALL]), rel=1e-5)
    capsys.readouterr()
    assert abs(first_loss([*flags, *NEW]) - given) > 0.01
    assert "\nweights: new, seed 1234\n" in capsys.readouterr().out


def test_weights_that_are_not_there_are_refused_with_two_ways_on(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    download = f"download it with `hf download ORG/NAME --local-dir {bare}`"
    flags = planned(bare, tmp_path)
    assert (
        f"\nweights: from {bare}, which has none yet: before training, {download}, or train new ones with "
        "--pretrained-checkpoint None\n"
    ) in capsys.readouterr().out
    for given in (flags, ["--model", str(bare), "--seq-len", "128", *SMALL]):
        with pytest.raises(SystemExit) as refused:
            main(["train", *given])
        assert refused.value.code == 2
        assert capsys.readouterr().err == (
            f"error: --pretrained-checkpoint {bare} has no weights, neither model.safetensors nor "
            f"model.safetensors.index.json: {download}, or train new ones with --pretrained-checkpoint None; other "
            "formats (.bin, .pth) must be saved as safetensors first\n"
        )
    assert main(["train", *flags, *NEW]) == 0
    assert "\nweights: new, seed 1234\n" in capsys.readouterr().out


def test_the_header_of_a_run_that_goes_on_names_its_checkpoint(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    again = ["--model", str(published), "--seq-len", "128", *SMALL, "--save", run, "--load", run]
    assert main(["train", *again]) == 0
    assert f"\nweights: from {published}\n" in capsys.readouterr().out
    assert main(["train", *again, "--train-iters", "2"]) == 0
    assert f"\nweights: from {run}, at iteration 1\n" in capsys.readouterr().out
