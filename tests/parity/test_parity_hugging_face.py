"""Models of every family are Hugging Face's, weight for weight: logits, losses and the gradient of every weight.

memo reads the weights from a directory that transformers wrote, and finds their gradients in another one, in the places
of the weights. transformers computes rotary angles, RMS norms and eager softmax in fp32 even when all weights are fp64,
so its answers are good to 1e-5. `Wide` turns each request for fp32 into one for fp64; then they are good to 1e-10.
"""

import functools
import math
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forward import Result, random_batch, run_once
from hf_directories import CONFIGS, VOCAB, global_tensors, make_model, write_model
from hugging_face import Wide
from layouts import tiny
from torch import Tensor

from memo.config.model_name import choose_model

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

SEQ_LENGTH, BATCH = 32, 2
GIVEN = random_batch(VOCAB, SEQ_LENGTH, BATCH)
EAGER = ("gemma2",)
"""Families whose attention transformers has right in its eager code alone, though it would take another."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@functools.cache
def published(name: str, folder: Path) -> Path:
    """The model as transformers writes it; its weights are exact in fp32, so all dtypes start from the same."""
    return write_model(name, folder)


ROUTER_LOSSES = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.02}


def their_router_losses(model: Any, scores: list[Tensor]) -> Tensor:
    """Sums over layers of what transformers calls load_balancing_loss, whose shares of the load sum to K, not to 1, and
    of the z-loss; of the scores of all layers, [t, E] each."""
    config, balance = model.config, transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    top_k = config.num_experts_per_tok
    found = scores[0].new_zeros(())
    for each in scores:
        found += ROUTER_LOSSES["moe_aux_loss_coeff"] * balance((each,), each.shape[-1], top_k) / top_k
        found += ROUTER_LOSSES["moe_z_loss_coeff"] * each.logsumexp(-1).square().mean()
    return found


def listen_to_scores(model: Any) -> list[Tensor]:
    """Filled in each forward of their model: the scores of each layer's router, before any softmax."""
    scores: list[Tensor] = []

    def note(router: Any, args: tuple[Tensor, ...], _: object) -> None:
        x = args[0].reshape(-1, router.weight.shape[1])
        scores.append(F.linear(x, router.weight, getattr(router, "bias", None)))

    for layer in model.model.layers:
        router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate
        router.register_forward_hook(note)
    return scores


@functools.cache
def run_theirs(name: str, folder: Path, dtype: torch.dtype, *, wide: bool, router_losses: bool = False) -> Result:
    """Their result on GIVEN, gradients under our names."""
    with Wide() if wide else nullcontext():
        model = make_model(name, dtype, "eager" if wide or name in EAGER else None)
        scores = listen_to_scores(model) if router_losses else []
        logits = model(input_ids=GIVEN.tokens.t(), use_cache=False).logits.transpose(0, 1)
        of_routers = their_router_losses(model, scores) if router_losses else 0.0
    losses = F.cross_entropy(logits.flatten(0, 1), GIVEN.labels.flatten(), reduction="none")
    losses = losses.view(SEQ_LENGTH, BATCH)
    loss = (losses * GIVEN.loss_weight).sum()
    (loss + of_routers).backward()
    return Result(logits.detach(), losses.detach(), loss.detach(), gradients_of(model))


@torch.no_grad()
def gradients_of(model: Any) -> dict[str, Tensor]:
    """Their gradients under our names: written in the places of the weights, and read as these are."""
    for parameter in model.parameters():
        parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        found = global_tensors(Path(directory))
    found = {name: values for name, values in found.items() if not name.endswith(("expert_bias", ".scalar"))}
    assert sum(values.numel() for values in found.values()) == sum(p.numel() for p in model.parameters())
    return found


def run_ours(name: str, folder: Path, dtype: str, tp: int = 1, **flags: Any) -> Result:
    run = tiny(dtype=dtype, seq_length=SEQ_LENGTH, micro_batch_size=BATCH, global_batch_size=BATCH)
    config = choose_model(run, published(name, folder)).override(flags)
    return run_once(config, GIVEN, tp=tp, passes=2 if flags else 1)


def errors(actual: Result, expected: Result) -> dict[str, float]:
    """Of each tensor, in the L2 norm.

    The gradient of a key bias without RoPE is zero (softmax ignores a common shift): what is left is
    rounding noise, which must be as small beside the query bias's gradient.
    """
    pairs = {
        "logits": (actual.logits, expected.logits),
        "losses": (actual.losses, expected.losses),
        "loss": (actual.loss, expected.loss),
        **{name: (actual.gradients[name], value) for name, value in expected.gradients.items()},
    }
    assert actual.gradients.keys() == expected.gradients.keys()
    found = {}
    for name, (mine, true) in pairs.items():
        scale = true.norm().item()
        if name.endswith("k.bias") and scale < 1e-10:
            scale = expected.gradients[name.replace("k.bias", "q.bias")].norm().item()
        found[name] = (mine.double() - true).norm().item() / scale
    return found


def assert_below(found: dict[str, float], bound: float) -> None:
    worst = max(found, key=lambda name: found[name])
    assert found[worst] < bound, f"{worst}: relative error {found[worst]:.1e} is not below {bound:.0e}"


@pytest.mark.parametrize("name", CONFIGS)
def test_fp64_equals_theirs_in_true_fp64(name: str, folder: Path) -> None:
    """1e-10 in fp64 throughout."""
    truth = run_theirs(name, folder, torch.float64, wide=True)
    assert_below(errors(run_ours(name, folder, "fp64"), truth), 1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_is_as_accurate_as_theirs(name: str, folder: Path) -> None:
    """fp32, error against fp64 at most twice theirs: logits, losses, gradients (mean square over tensors)."""
    truth = run_theirs(name, folder, torch.float64, wide=True)
    theirs = run_theirs(name, folder, torch.float32, wide=False)
    ours, allowed = (_summary(errors(result, truth)) for result in (run_ours(name, folder, "fp32"), theirs))
    for kind, error in ours.items():
        assert error <= 2 * allowed[kind], f"{kind}: our fp32 error is {error:.1e}, theirs {allowed[kind]:.1e}"


def _summary(found: dict[str, float]) -> dict[str, float]:
    kinds = {kind: found.pop(kind) for kind in ("logits", "losses")}
    del found["loss"]  # one number may be right by luck
    return kinds | {"gradients": math.sqrt(sum(error**2 for error in found.values()) / len(found))}


IN_FULL = ("gpt_oss", "glm4_moe", "qwen3_5_moe_text", "olmo3")
"""Families whose tp 2 equals one process in tests/distributed/test_layouts.py."""


@pytest.mark.parametrize(
    "name", ["gpt2", "gemma2", "gemma3_text", *(pytest.param(name, marks=pytest.mark.full) for name in IN_FULL)]
)
def test_tensor_parallel_equals_theirs(name: str, folder: Path) -> None:
    """tp 2, 1e-10 in fp64: logits, losses and every weight's gradient put together from the ranks."""
    truth = run_theirs(name, folder, torch.float64, wide=True)
    assert_below(errors(run_ours(name, folder, "fp64", tp=2), truth), 1e-10)


@pytest.mark.parametrize(("name", "tp"), [("qwen3_moe-shares-of-all", 2), ("gpt_oss", 1)])
def test_router_losses_have_the_gradients_of_theirs(name: str, tp: int, folder: Path) -> None:
    """1e-10 in fp64, once the load of the step before is that of the same tokens; they are no part of the loss."""
    truth = run_theirs(name, folder, torch.float64, wide=True, router_losses=True)
    ours = run_ours(name, folder, "fp64", tp, **ROUTER_LOSSES)
    assert_below(errors(ours, truth), 1e-10)
    without = run_theirs(name, folder, torch.float64, wide=True)
    moved = errors(ours, without)
    assert moved["loss"] < 1e-10 and moved["layers.0.mlp.router.weight"] > 1e-3
