"""New models that are written to Hugging Face directories compute what transformers computes with them.

test_parity_hugging_face.py has those that are read. transformers has angles and RMS norms in fp32 even for fp64
weights, so its answers are good to 1e-5.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from forward import random_batch, run_on_rank
from hf_directories import load_model
from layouts import global_pieces, make, one_step_backward, tiny
from torch import Tensor

from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import save_checkpoint
from memo.config import PRESETS, RunConfig
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
