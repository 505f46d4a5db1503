"""Parameters of every preset in every layout: each element of the model once, alike whatever the layout.

No processes: a parameter's shape and pieces follow from the rank and the size of its tp group alone, and it
has no memory until someone gives it some.
"""

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from memo.config import RunConfig, preset
from memo.config.checks import check
from memo.config.presets import PRESETS, PUBLISHED
from memo.model.parts import ModelParts
from memo.model.transformer import TransformerChunk
from memo.parallel.shards import Piece, ShardedParameter, initialize
from memo.spec.parameters import count_parameters, layer_parameters, stage_parameters
from memo.spec.schedule import Pipeline
from memo.spec.shapes import shape_of

torch.set_num_threads(1)

LAYOUTS = [(1, 1), (2, 1), (2, 2), (1, 4), (8, 4)]  # (tp, pp)


@dataclass(frozen=True)
class Seat:
    """A rank's seat in a group that does not communicate."""

    at: int
    num_ranks: int

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return self.num_ranks


def make_config(name: str, tp: int, pp: int, **overrides: Any) -> RunConfig:
    model = preset(name)
    values = {"tp": tp, "pp": pp, "vocab_size": model.vocab_size or 257, "seq_length": 64, "mock_data": True}
    return RunConfig(model=model).override(values | overrides)


def build_stage(config: RunConfig, tp_rank: int, stage: int) -> list[ShardedParameter]:
    """Parameters of one rank, a tied one once."""
    group: Any = Seat(tp_rank, config.parallel.tp) if config.parallel.tp > 1 else None
    parts = ModelParts(config.model, torch.float32, group, attention=lambda _: lambda q, k, v, documents: q)
    chunk = TransformerChunk(
        parts,
        Pipeline(config.parallel.pp, 1, config.parallel.pp).layers(stage, 0, config.model.num_layers),
        first=stage == 0,
        last=stage == config.parallel.pp - 1,
        seq_length=config.data.seq_length,
        loss_chunk_size=8,
    )
    parameters = list(chunk.parameters())
    assert all(isinstance(p, ShardedParameter) and p.is_meta for p in parameters)
    return parameters  # type: ignore[return-value]


def suits(name: str, tp: int, pp: int) -> bool:
    """The tiny presets have 4 heads, 2 groups and 4 layers."""
    model = preset(name)
    return model.kv_heads % tp == 0 and model.num_layers % pp == 0


KINDS = {
    (
        m.normalization,
        m.qkv_bias,
        m.qk_layernorm,
        m.untie_embeddings_and_output_weights,
        m.num_experts > 0,
        m.norms,
    ): name
    for name, m in reversed(list(PRESETS.items()))
}
NAMES = sorted({*KINDS.values(), "llama-3.1-8b", "llama-3.1-70b", "gpt-7b", "gpt-65b", "mistral-small-24b"})
"""A preset of each kind, and some of odd sizes."""
CASES = [(name, tp, pp) for name in NAMES for tp, pp in LAYOUTS if suits(name, tp, pp)]


def overlap(a: Piece, b: Piece) -> bool:
    pairs = zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    return all(start < other + length and other < start + size for start, size, other, length in pairs)


@pytest.mark.parametrize(("name", "tp", "pp"), CASES)
def test_pieces_tile_the_model(name: str, tp: int, pp: int) -> None:
    """Distinct pieces of one global tensor never overlap and fill it; their sum is the counted model. Each rank has as
    many elements as is counted of its stage, vocabulary padding included."""
    config = make_config(name, tp, pp)
    check(config, tp * pp)
    pieces: dict[str, dict[tuple[Any, ...], Piece]] = {}
    for stage in range(pp):
        for rank in range(tp):
            parameters = build_stage(config, rank, stage)
            assert sum(parameter.numel() for parameter in parameters) == stage_parameters(config, stage)
            for parameter in parameters:
                for piece in parameter.shard.pieces:
                    pieces.setdefault(piece.name, {})[piece.offset, piece.shape] = piece
    total = 0
    for name, distinct in pieces.items():
        (shape,) = {piece.global_shape for piece in distinct.values()}
        assert not any(overlap(a, b) for a, b in combinations(distinct.values(), 2)), name
        assert sum(math.prod(piece.shape) for piece in distinct.values()) == math.prod(shape), name
        total += math.prod(shape)
    assert total == count_parameters(config)


def test_published_sizes() -> None:
    """From the models' own pages, a matrix that embedding and head share counted once; and of a layer of Llama 3.1 8B,
    218,112,000."""
    sizes = {
        "tinyllama-1.1b": 1_100_048_384,
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-2-70b": 68_976_648_192,
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496,
        "llama-3.1-405b": 405_853_388_800,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
        "llama-3.3-70b": 70_553_706_496,
        "mistral-7b": 7_248_023_552,
        "mistral-small-24b": 23_572_403_200,
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-1.5b": 1_543_714_304,
        "qwen2.5-3b": 3_085_938_688,
        "qwen2.5-7b": 7_615_616_512,
        "qwen2.5-14b": 14_770_033_664,
        "qwen2.5-32b": 32_763_876_352,
        "qwen2.5-72b": 72_706_203_648,
        "qwen3-0.6b": 596_049_920,
        "qwen3-1.7b": 1_720_574_976,
        "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360,
        "qwen3-14b": 14_768_307_200,
        "qwen3-32b": 32_762_123_264,
        "gpt-oss-20b": 20_914_757_184,
        "gpt-oss-120b": 116_829_156_672,
        "gemma-2-2b": 2_614_341_888,
        "gemma-2-9b": 9_241_705_984,
        "gemma-2-27b": 27_227_128_320,
        "gemma-3-1b": 999_885_952,
        "gemma-3-4b": 3_880_263_168,
        "gemma-3-12b": 11_766_034_176,
        "gemma-3-27b": 27_009_346_304,
        "gemma-4-12b": 11_907_350_272,
        "gemma-4-26b-a4b": 25_233_141_760,
        "gemma-4-31b": 30_697_345_280,
        "qwen3.5-4b": 4_205_751_296,
        "qwen3.5-27b": 26_895_998_464,
        "qwen3.5-9b": 8_953_803_264,
        "qwen3.5-35b-a3b": 34_660_610_688,
        "qwen3-next-80b-a3b": 79_674_391_296,
        "glm-4.5-air": 106_852_245_504,
        "deepseek-v2-lite": 15_706_484_224,
        "deepseek-v3": 671_026_404_352,  # and 14,848 biases of routers
        "moonlight-16b-a3b": 15_960_108_544,
        "glm-4.7-flash": 29_943_390_976,
        "mistral-small-4-119b": 118_972_826_624,
        "ministral-3-8b": 8_489_553_920,
        "olmo-2-7b": 7_298_617_344,
        "olmo-2-13b": 13_716_198_400,
        "olmo-2-32b": 32_234_279_936,
        "olmo-3-7b": 7_298_011_136,
        "olmo-3-32b": 32_233_522_176,
        "qwen3-30b-a3b": 30_532_122_624,
        "qwen3-235b-a22b": 235_093_634_560,
        "minimax-m2": 228_689_748_992,
        "mixtral-8x7b": 46_702_792_704,
        "mixtral-8x22b": 140_630_071_296,
        "olmoe-1b-7b": 6_919_161_856,
        "phi-4": 14_659_507_200,
        "phi-4-mini": 3_836_021_760,
        "seed-oss-36b": 36_151_104_512,
        "exaone-4.0-32b": 32_003_216_384,
        "smollm3-3b": 3_075_098_624,
        "smollm2-1.7b": 1_711_376_384,
    }
    assert {name: count_parameters(make_config(name, 1, 1)) for name in sizes} == sizes
    papers = {"gpt-7b", "gpt-13b", "gpt-30b", "gpt-65b"}  # of no published weights
    assert set(PUBLISHED) - papers == sizes.keys()
    assert layer_parameters(preset("llama-3.1-8b")).total == 218_112_000
    fewer = replace(preset("mistral-small-4-119b"), num_layers=4)
    assert fewer.layers_with_experts == (True,) * 4  # without a list for 36 layers
    active = {
        "qwen3-30b-a3b": 3.3,
        "qwen3-235b-a22b": 22,
        "mixtral-8x7b": 12.9,
        "mixtral-8x22b": 39,
        "olmoe-1b-7b": 1.3,
        "deepseek-v3": 37.55,
    }
    for name, billions in active.items():  # as printed on the models' pages
        assert shape_of(preset(name), name, 0).active_parameters / 1e9 == pytest.approx(billions, rel=0.02), name


def initial_values(config: RunConfig, seed: int) -> dict[str, Tensor]:
    """Global tensors put together from all ranks; replicas must agree, padding must be zero."""
    found: dict[str, Tensor] = {}
    for stage in range(config.parallel.pp):
        for rank in range(config.parallel.tp):
            for meta in build_stage(config, rank, stage):
                local = ShardedParameter(torch.full(meta.shape, float("nan")), meta.shard)
                initialize(local, seed)
                rest = local.detach().clone()
                for piece in meta.shard.pieces:
                    whole = found.setdefault(piece.name, torch.full(piece.global_shape, float("nan")))
                    target, value = piece.of_global(whole), piece.of_local(local.detach())
                    assert target.isnan().all() or torch.equal(target, value), f"replicas of {piece.name}"
                    target.copy_(value)
                    piece.of_local(rest).zero_()
                assert not rest.any(), "padding is not zero"
    assert not any(value.isnan().any() for value in found.values())
    return found


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt2-tiny", "llama-tiny", "qwen3-tiny"])
def test_initial_weights_do_not_depend_on_the_layout(name: str) -> None:
    """fp32, equal to the last bit."""
    alone = initial_values(make_config(name, 1, 1), seed=3)
    for tp, pp in ((2, 1), (2, 4)):
        split = initial_values(make_config(name, tp, pp), seed=3)
        assert split.keys() == alone.keys()
        assert all(torch.equal(split[key], alone[key]) for key in alone)
    other = initial_values(make_config(name, 1, 1), seed=4)
    assert all(torch.equal(alone[key], other[key]) == (alone[key].unique().numel() == 1) for key in alone)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_initial_distribution(name: str) -> None:
    """Megatron's: N(0, std), output projections N(0, std / sqrt(2 layers)); ones, zeros; no two alike."""
    config = make_config(name, 1, 1, init_method_std=0.05)
    values = initial_values(config, seed=3)
    matrices = {key: value for key, value in values.items() if value.ndim == 2}
    for key, value in matrices.items():
        scaled = key.endswith(("projection.weight", "fc2.weight"))
        std = 0.05 / math.sqrt(2 * config.model.num_layers) if scaled else 0.05
        # Standard errors of mean and standard deviation of N samples; five of them.
        slack = 5 * std / math.sqrt(value.numel())
        assert abs(value.mean().item()) < slack and abs(value.std().item() - std) < slack, key
    firsts = [value.flatten()[:8].div(value.std()).tolist() for value in matrices.values()]
    assert len({tuple(round(x, 3) for x in row) for row in firsts}) == len(firsts)
    for key, value in values.items():
        if value.ndim == 1:
            expected = 0.0 if key.endswith("bias") else 1.0
            assert torch.equal(value, torch.full_like(value, expected)), key
