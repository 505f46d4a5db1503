"""A checkpoint that is not what was written is refused: bits flipped, files cut short, swapped, or of another save."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import contents
from layouts import make, one_step_backward, tiny
from ranks import run_ranks
from torch import Tensor

from memo.checkpoint.run_state import RunState, read_sealed_state
from memo.checkpoint.store import load_checkpoint, open_checkpoint, save_checkpoint
from memo.errors import CheckpointError

torch.set_num_threads(1)
NUM_FLIPS = 40
"""In each run of the tests; 500 were made by hand, and none was loaded with other values."""


def _save(directory: Path) -> None:
    """Two checkpoints, of the iterations 1 and 2, by two ranks with a part each."""
    model, feed = make(tiny(tp=2), 2)
    for iteration in (1, 2):
        one_step_backward(model, feed)
        model.optimizer.step(1e-2)
        facts = {"model": {"rotary_base": 1e4}, "data": {"seq_length": 64}}
        state = RunState(iteration, 4 * iteration, 7, iteration, 0, 0, 4, **facts)
        save_checkpoint(directory, state, model.optimizer.segment_states(), model.mesh)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    run_ranks(2, _save, directory)
    return directory


@pytest.fixture(scope="module")
def whole(directory: Path) -> tuple[RunState, dict[str, Tensor]]:
    return contents(directory / "iter_0000002")


@pytest.fixture
def final(directory: Path, tmp_path: Path) -> Path:
    """A copy of the newer one to be damaged; the older stands beside it."""
    shutil.copytree(directory, tmp_path / "copy")
    return tmp_path / "copy" / "iter_0000002"


def is_other(final: Path, whole: tuple[RunState, dict[str, Tensor]]) -> bool:
    """Whether it can be loaded, and holds anything else than what was saved."""
    try:
        state, values = contents(final)
    except CheckpointError:
        return False
    different = [name for name, value in values.items() if not torch.equal(value, whole[1][name])]
    return state != whole[0] or values.keys() != whole[1].keys() or bool(different)


def flipped(final: Path, dice: random.Random, count: int) -> list[tuple[str, int, Callable[[], None]]]:
    """`count` single bits over all files, each file as often as others: (file, bit, puts it back)."""
    files = sorted(final.iterdir())
    chosen = []
    for i in range(count):
        path = files[i % len(files)]
        chosen.append((path.name, dice.randrange(8 * path.stat().st_size), path))
    return [(name, bit, lambda path=path, bit=bit: flip(path, bit)) for name, bit, path in chosen]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


def test_no_flipped_bit_is_loaded_with_other_values(final: Path, whole: tuple[RunState, dict[str, Tensor]]) -> None:
    assert len(list(final.iterdir())) == 4  # the state, the index, and what two ranks wrote
    loaded = []
    for name, bit, turn in flipped(final, random.Random(14), NUM_FLIPS):
        turn()
        if is_other(final, whole):
            loaded.append((name, bit))
        turn()
    assert loaded == []
    assert not is_other(final, whole)


def test_a_damaged_tensor_names_file_tensor_and_the_older_checkpoint(final: Path) -> None:
    rectangle = open_checkpoint(final)[1]["exp_avg/layers.1.mlp.fc1.weight"].rectangles[0]
    flip(final / rectangle.file, 8 * rectangle.at_byte + 3)
    with pytest.raises(CheckpointError) as caught:
        contents(final)
    message = str(caught.value)
    assert f"{final} cannot be read ({rectangle.file}: exp_avg/layers.1.mlp.fc1.weight, " in message
    assert f"(xxh3_64), but {rectangle.xxh3_64} was written: the file is damaged" in message
    assert f"give {final.with_name('iter_0000001')} instead, the newest other one there" in message
    assert message.endswith("or take it as it is with --no-verify-checkpoint") and "\n" not in message


def test_what_is_damaged_can_be_taken_as_it_is(final: Path) -> None:
    rectangle = open_checkpoint(final)[1]["master/final_norm.weight"].rectangles[0]
    flip(final / rectangle.file, 8 * rectangle.at_byte)
    (final / "run_state.json").write_text((final / "run_state.json").read_text().replace("64\n", "65\n"))
    model, _ = make(tiny(), 1)
    segments = model.optimizer.segment_states()
    with pytest.raises(CheckpointError, match=r"run_state.json has another checksum than it says: it is damaged"):
        load_checkpoint(final, segments, model.mesh)
    assert load_checkpoint(final, segments, model.mesh, verify=False).data == {"seq_length": 65}


def test_a_file_that_is_cut_short_is_found_before_anything_is_read(final: Path) -> None:
    path = final / "tensors-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"tensors-00001.bin has \d+ bytes, but \d+ were written"):
        open_checkpoint(final)


@pytest.mark.parametrize("name", ["index.json", "run_state.json", "tensors-00000.bin"])
def test_a_file_of_another_checkpoint_is_refused(final: Path, name: str) -> None:
    shutil.copy(final.with_name("iter_0000001") / name, final / name)
    with pytest.raises(CheckpointError, match="checksum"):
        contents(final)


def test_equal_bytes_under_another_layout_of_json_are_the_same_state(final: Path) -> None:
    path = final / "run_state.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert read_sealed_state(final)[0].iteration == 2


def _load_what_one_rank_finds_damaged(directory: Path, file: str) -> str:
    model, _ = make(tiny(tp=2), 2)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory, model.optimizer.segment_states(), model.mesh)
    return str(caught.value)


@pytest.mark.parametrize("file", ["tensors-00000.bin", "tensors-00001.bin"])
def test_every_rank_hears_of_what_one_rank_finds(final: Path, file: str) -> None:
    flip(final / file, 8 * ((final / file).stat().st_size - 1))
    messages = run_ranks(2, _load_what_one_rank_finds_damaged, final.parent, file)
    assert messages[0] == messages[1] and f"({file}: " in messages[0] and "the file is damaged" in messages[0]
