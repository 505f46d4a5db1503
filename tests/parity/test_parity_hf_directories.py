"""Models read from and written to Hugging Face directories compute what transformers computes with them.

transformers has angles and RMS norms in fp32 even for fp64 weights, so its answers are good to 1e-5.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forward import random_batch, run_on_rank
from hf_directories import CONFIGS, VOCAB, load_model, write_model
from layouts import global_pieces, make, one_step_backward, tiny
from torch import Tensor

from memo import Trainer
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import save_checkpoint
from memo.config import PRESETS, RunConfig
from memo.config.model_name import choose_model
from memo.config.run import read_toml
from memo.data.sample import Sample, cut_sample
from memo.model.transformer import Microbatch

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
SEQ_LENGTH, BATCH, BOUND = 64, 2, 1e-5
MODELS = {  # every family that memo writes, and what a long context adds
    "gpt-tiny": {},
    "gpt2-tiny": {},
    "llama-tiny": {},
    "qwen3-tiny": {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0}
    | {"rope_original_max_position_embeddings": 16},
    "llama-window": {"window_size": 9},
    "llama-layers": {"window_size": 9, "layer_types": "full,sliding"},
    "llama-qkv-bias": {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
}


@torch.no_grad()
def their_logits(directory: Path, batch: Microbatch) -> Tensor:
    logits: Tensor = load_model(directory)(input_ids=batch.tokens.t(), use_cache=False).logits
    return logits.transpose(0, 1)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.dtype == torch.float64
    error = float((ours - theirs).norm() / theirs.norm())
    assert error < BOUND, f"relative error {error:.1e} is not below {BOUND:.0e}"


def base(name: str = "gpt-tiny", **overrides: Any) -> RunConfig:
    return tiny(name, micro_batch_size=BATCH, global_batch_size=BATCH, seq_length=SEQ_LENGTH, **overrides)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_read_computes_as_theirs(name: str, tmp_path: Path) -> None:
    directory = write_model(name, tmp_path, torch.float64)
    batch = random_batch(VOCAB, SEQ_LENGTH, BATCH)
    ours = run_on_rank(choose_model(base(), directory), batch, None, 1)
    theirs = their_logits(directory, batch)
    assert_same(ours.logits, theirs)
    loss = F.cross_entropy(theirs.flatten(0, 1), batch.labels.flatten())
    assert float(ours.loss) == pytest.approx(float(loss), rel=BOUND)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_computes_as_ours(name: str, tmp_path: Path) -> None:
    config = base(name if name in PRESETS else "llama-tiny", **MODELS[name])
    model, feed = make(config, 1)
    for _ in range(2):  # biases are no longer zero, norms no longer one
        one_step_backward(model, feed)
        model.optimizer.step(0.1)
    save_checkpoint(tmp_path / "run", RunState(2, 8, 7, 2, 0, 0), model.optimizer.segment_states(), model.mesh)
    (tmp_path / "run" / "config.toml").write_text(config.to_toml())
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    batch = random_batch(config.model.vocabulary, SEQ_LENGTH, BATCH)
    ours = run_on_rank(config, batch, global_pieces(model, "master"), 1)
    assert_same(ours.logits, their_logits(tmp_path / "out", batch))


class Texts:
    """Samples of one document each, which transformers needs no mask for."""

    seq_length = SEQ_LENGTH

    def sample(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(0, VOCAB, SEQ_LENGTH + 1)
        return cut_sample(tokens, np.array([], dtype=int))


@torch.no_grad()
def their_loss(directory: Path, samples: list[Sample]) -> float:
    tokens, labels = (torch.tensor(np.stack([getattr(s, kind) for s in samples])) for kind in ("tokens", "labels"))
    logits = load_model(directory)(input_ids=tokens, use_cache=False).logits
    return float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_trainer_goes_on_from_a_directory_and_back(tmp_path: Path) -> None:
    """The road of a user: from a directory, train, save, resume elsewhere without the directory, export."""
    directory = write_model("qwen3", tmp_path)
    texts = Texts()
    flags: dict[str, Any] = {"seq_length": SEQ_LENGTH, "device": "cpu", "offload_alpha": "off"}
    flags |= {"micro_batch_size": BATCH, "train_data": texts}
    run = str(tmp_path / "run")
    published_loss = their_loss(directory, [texts.sample(i) for i in range(BATCH)])
    with Trainer(directory, **flags, train_iters=2, lr=1e-3, save=run) as trainer:
        first = trainer.step()
        trainer.train()
        assert first.lm_loss == pytest.approx(published_loss, rel=BOUND)
        weights = global_pieces(trainer.parts, "master")
    batch = random_batch(VOCAB, SEQ_LENGTH, BATCH)
    before = their_logits(directory, batch)
    config = choose_model(base(), directory)
    config = config.override({"pretrained_checkpoint": None})
    export_checkpoint(run, tmp_path / "out", dtype="fp64")
    shutil.rmtree(directory)
    again = RunConfig().override(read_toml(Path(run) / "config.toml"))
    with Trainer(config=again, load=run, train_iters=3, train_data=texts) as trainer:
        assert trainer.iteration == 2
        record = trainer.train()
        assert record is not None and record.lm_loss < first.lm_loss
    ours = run_on_rank(config, batch, {name: value.double() for name, value in weights.items()}, 1)
    after = their_logits(tmp_path / "out", batch)
    assert_same(ours.logits, after)
    assert float((after - before).norm() / before.norm()) > 100 * BOUND  # training did move it
