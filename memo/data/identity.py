"""What a dataset is, for a checkpoint to name: not where it lies, but what is in it and how samples are cut from it."""

from pathlib import Path

from memo.artifacts.checksum import checksum_of
from memo.config.blend import read_blend
from memo.config.data import DataConfig
from memo.config.identity import Fact
from memo.data.facts import TOKENIZER_SUFFIX
from memo.data.sample import SampleDataset


def data_identity(data: DataConfig, dataset: SampleDataset) -> dict[str, Fact]:
    """By flag, all in memo.config.identity.DATA_FACTS.

    An object that a user brings says what it is by a method `identity() -> dict[str, Fact]`, or nothing but its length.
    """
    found: dict[str, Fact] = {"seq_length": dataset.seq_length}
    describe = getattr(dataset, "identity", None)
    if describe is not None:
        found |= describe()
    if data.data_path is not None:
        prefixes = read_blend("--data-path", data.data_path).prefixes
        tokenizers = (Path(f"{prefix}{TOKENIZER_SUFFIX}") for prefix in prefixes)
        tokenizer = next(filter(Path.is_file, tokenizers), None)  # corpora of one blend have the same
        if tokenizer is not None:
            found["tokenizer"] = checksum_of(tokenizer.read_bytes())
    return found
