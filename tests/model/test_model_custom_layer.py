"""A layer that is not in memo, as examples/custom_model.py has one: what plain autograd computes, in fp64.

Its layouts are rows of tests/distributed/test_layouts.py, and its swap plans of tests/executor/test_bits.py.
"""

import dataclasses
from typing import Any

import pytest
import torch
from custom_layers import PARALLEL, parallel_layer
from layouts import make, tiny
from ranks import run_ranks

from memo.config import RunConfig
from memo.config.checks import check
from memo.config.to_hugging_face import write_config
from memo.errors import ConfigError
from memo.model.transformer import Microbatch
from memo.spec.custom_layer import check_split, custom_facts, load_layer
from memo.spec.parameters import layer_parameters
from memo.spec.skeleton import skeletal_tensors

BOUND = 1e-12


def config_of(layer: str, **values: object) -> RunConfig:
    return tiny("llama-tiny", custom_layer=layer, **{"global_batch_size": 2, **values})


def test_the_example_is_what_plain_autograd_computes() -> None:
    """Output, gradient of the input and of every weight of one layer, and of a whole model's loss."""
    run_ranks(1, compare_with_autograd)


def compare_with_autograd() -> None:
    config = config_of(PARALLEL, num_layers=1, global_batch_size=1)
    model, _ = make(config, 1)
    chunk = model.chunks[0]
    named = {p.shard.pieces[0].name: p for p in chunk.layers[0].parameters()}
    weights: dict[str, torch.Tensor] = {}
    for parameter in named.values():
        for piece in parameter.shard.pieces:
            part = piece.of_local(parameter).detach().clone().requires_grad_()
            weights[piece.name.removeprefix("layers.0.")] = part
    tokens = torch.arange(64).unsqueeze(1)
    batch = Microbatch(tokens, tokens, tokens, tokens.double(), tokens, None)
    x = torch.randn(64, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = chunk.layers[0](ours, chunk.contexts(batch)[0]), parallel_layer(weights, config.model, theirs)
    assert_near(y, expected)
    grad = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(4))
    model.data_parallel.main_gradients.begin_step(1, None)
    y.backward(grad)
    expected.backward(grad)
    assert_near(ours.grad, theirs.grad)
    found = 0
    for parameter in named.values():
        main = model.data_parallel.main_gradients.main_gradient(parameter)
        for piece in parameter.shard.pieces:
            assert_near(piece.of_local(main), weights[piece.name.removeprefix("layers.0.")].grad)
            found += 1
    assert found == len(weights) == 8


def assert_near(actual: Any, expected: Any) -> None:
    assert ((actual - expected).abs().max() / expected.abs().max()).item() <= BOUND


def test_what_is_planned_follows_from_the_class() -> None:
    config = config_of(PARALLEL)
    model = config.model
    assert [w.name for w in custom_facts(model).weights] == [
        *("norm.weight", "qkv.weight", "projection.weight", "fc1.weight", "fc2.weight")
    ]
    h, f, q, kv = 32, 48, 32, 16
    assert layer_parameters(model).total == h + (q + 2 * kv) * h + q * h + 2 * f * h + f * h
    moved = {tensor.name: (tensor.kind, tensor.width) for tensor in skeletal_tensors(model)}
    assert moved["fc1"] == ("token_wise", 2 * f) and moved["qkv"] == ("token_wise", q + 2 * kv)
    assert {name for name, (kind, _) in moved.items() if kind == "always"} == {"input", "attention_out", "lse"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers", r"--custom-layer layers is not of the form .*: give both"),
        ("nowhere.py:Layer", r"cannot be loaded \(FileNotFoundError.*: give the path"),
        (PARALLEL.replace("ParallelLayer", "Missing"), r"has no class Missing: name a class"),
        (PARALLEL.replace("ParallelLayer", "sys"), r"names sys, which is no memo.CustomLayer"),
        (f"{__file__}:Undeclared", r"parameter other.weight that parts did not make.*: make it by parts"),
        (f"{__file__}:Narrow", r"returns \[8, 1, 32\] from before_attention: return a tensor \[8, 1, 64\]"),
        (f"{__file__}:Twice", r"makes norm.weight twice: give each"),
        (f"{__file__}:Idle", r"makes other.weight and does not use it: use it in every forward, or leave it out"),
        (f"{__file__}:Unlike", r"makes other parameters for layer 1 than for layer 0: make the same for each"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        custom_facts(config_of(name).model)


_Parallel = load_layer(PARALLEL)


class Undeclared(_Parallel):  # type: ignore[misc, valid-type]
    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.other = torch.nn.Linear(4, 4)


class Narrow(_Parallel):  # type: ignore[misc, valid-type]
    def before_attention(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Twice(_Parallel):  # type: ignore[misc, valid-type]
    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.norm = parts.norm("norm")


class Idle(_Parallel):  # type: ignore[misc, valid-type]
    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.other = parts.norm("other")


class Unlike(_Parallel):  # type: ignore[misc, valid-type]
    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.fc1, self.fc2 = parts.column("wide", 16 * (parts.index + 3)), parts.row("narrow", 16 * (parts.index + 3))


def test_what_fights_with_a_custom_layer_is_refused() -> None:
    config = config_of(PARALLEL)
    with pytest.raises(ConfigError, match=r"conflicts with --pretrained-checkpoint dir.*leave one"):
        check(config.override({"pretrained_checkpoint": "dir"}), 1)
    with pytest.raises(ConfigError, match=r"conflicts with --attention-sinks: that is for memo's own layer; leave one"):
        check(config.override({"attention_sinks": True}), 1)
    with pytest.raises(ConfigError, match=r"cannot be exported: read its checkpoint"):
        write_config(config.model, 64, None)
    odd = dataclasses.replace(config.model, ffn_hidden_size=50)
    with pytest.raises(ConfigError, match=r"fc1.gate.weight has 50 rows, which do not divide by --tp 4: use a --tp"):
        check_split(odd, 4)
