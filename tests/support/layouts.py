"""Train a tiny model in any layout and bring losses, gradients and weights back as global tensors."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from memo.checkpoint.chunks import global_chunks
from memo.config import RunConfig, preset
from memo.config.checks import check
from memo.data import GlobalBatchSampler, MockDataset
from memo.parallel.dtypes import torch_dtype
from memo.train.build import build, build_mesh
from memo.train.feed import Feed
from memo.train.parallel_model import ParallelModel


@dataclass
class Outcome:
    """Results of training: figures of each step on any rank, and tensors by global name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the last step


def tiny(model: str = "gpt-tiny", dtype: str = "fp64", **overrides: object) -> RunConfig:
    """Two layers, h = 32, 4 heads, 64 tokens; small enough for eight ranks on two cores."""
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "kv_channels": 8}
    values: dict[str, object] = {**shape, "seq_length": 64, "params_dtype": dtype, "mock_data": True}
    values |= {"micro_batch_size": 1, "global_batch_size": 4, "lr": 1e-2, "loss_chunk_size": 24}
    values |= {"device": "cpu", "ddp_bucket_size": 5000, "offload_alpha": "off"}
    if model != "gpt-tiny":
        values |= {"num_query_groups": 2, "ffn_hidden_size": 48} if model != "gpt2-tiny" else {}
    if model == "deepseek-tiny":
        values |= {"kv_channels": None, "num_query_groups": 4, "q_lora_rank": 24, "kv_lora_rank": 20}
        values |= {"qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 10}
    base = RunConfig(model=preset(model))
    return base.override({**values, **overrides})


def make(config: RunConfig, world_size: int) -> tuple[ParallelModel, Feed]:
    """The model and its feed on this rank."""
    check(config, world_size)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = build_mesh(config, rank, world_size)
    model = build(config, mesh, torch_dtype(str(config.training.params_dtype)), torch.device("cpu"))
    data = MockDataset(config.model.vocabulary, config.data.seq_length, seed=7, mean_document_length=23)
    sampler = GlobalBatchSampler(config.training.global_batch_size or 1, seed=7)
    tiles = model.tiles
    return model, Feed(data, sampler, mesh, config, torch.device("cpu"), tiles)


def train_here(config: RunConfig, world_size: int, steps: int) -> Outcome:
    """Train on this rank, in this process."""
    model, feed = make(config, world_size)
    outcome = Outcome()
    for step in range(steps):
        outcome.losses.append(one_step_backward(model, feed))
        if step == 0:
            outcome.gradients = global_pieces(model, "grad")
        norm, updated = model.optimizer.step(config.training.lr)
        assert updated
        outcome.norms.append(norm)
    outcome.weights = global_pieces(model, "master")
    return outcome


def one_step_backward(model: ParallelModel, feed: Feed) -> float:
    """Run forward and backward of one global batch, and the reduction; return the loss of this rank's share."""
    batches = feed.next_global_batch()
    loss = model.forward_backward(batches)
    return float(loss) if model.mesh.at.tp == 0 else 0.0


def global_pieces(model: ParallelModel, kind: str) -> dict[str, Tensor]:
    """Return every global tensor with this rank's part, and NaN elsewhere."""
    found: dict[str, Tensor] = {}
    for segment in model.optimizer.segments:
        values = segment.weight.grad if kind == "grad" else segment.weight.detach()
        for name, tensor in global_chunks(segment.segment, segment.shard, values).items():
            whole = found.setdefault(name, torch.full(tensor.shape, float("nan"), dtype=values.dtype))
            for part in tensor.parts:
                whole[part.place] = part.values()
    return found


def train(config: RunConfig, world_size: int = 1, steps: int = 3) -> Outcome:
    """Train on `world_size` processes; every replica of a value must agree to the last bit."""
    results = run_ranks(world_size, train_here, config, world_size, steps)
    return Outcome(
        losses=[sum(r.losses[i] for r in results) for i in range(steps)],
        norms=results[0].norms,
        gradients=assemble([r.gradients for r in results]),
        weights=assemble([r.weights for r in results]),
    )


def assemble(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            known = merged.setdefault(name, torch.full_like(tensor, float("nan")))
            fresh = ~tensor.isnan()
            both = fresh & ~known.isnan()
            assert torch.equal(known[both], tensor[both]), f"replicas of {name} differ"
            known[fresh] = tensor[fresh]
    holes = [name for name, tensor in merged.items() if tensor.isnan().any()]
    assert not holes, f"no rank holds all of {holes}"
    return merged


def relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, relative to that tensor's largest value.

    Tensors below a ten-thousandth of the largest count as if they were that large: the gradient of a key bias is
    zero in exact arithmetic (softmax ignores a common shift), so only rounding noise is left to compare.
    """
    floor = 1e-4 * max(value.abs().max() for value in expected.values())
    assert actual.keys() == expected.keys()
    return max(
        ((actual[name] - value).abs().max() / value.abs().max().clamp_min(floor)).item()
        for name, value in expected.items()
    )
