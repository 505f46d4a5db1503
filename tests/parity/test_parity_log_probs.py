"""Log-probs, and steps on a loss over them, are those of autograd through all of transformers' logits.

fp64 in both, with requests for fp32 turned into fp64. Log-probs agree to 1e-9 of the largest, and gradients of a loss
over them to 1e-9 of each tensor's largest.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face import Wide, needs
from layouts import assemble, global_pieces, relative_error
from lora_models import (
    gradients_of_steps,
    lora_config,
    our_gradients,
    some_samples,
    their_log_probs,
    their_model,
    write_lora_model,
)
from ranks import run_ranks
from torch import Tensor

import memo
from memo.data import Sample
from memo.train.log_probs import completion_numbers

pytestmark = needs("transformers", "peft")
torch.set_num_threads(1)

BOUND = 1e-9
SWAPPED = {"offload_alpha": 0.5, "offload_granularity": "tile", "offload_tiles": 8, "offload_slot_tiles": 2}
SWEPT = {**SWAPPED, "offload_hidden_states": True}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"offload_states": "all"}),
    (2, {"tp": 2, **SWAPPED}),
    (2, {"cp": 2}),
    (2, {"pp": 2}),
    (2, {"data_parallel_sharding_strategy": "optim_grads_params", "micro_batch_size": 1}),
    (1, {"micro_batch_size": 2, **SWEPT}),
]
SAMPLES = some_samples(13)
"""Of more than one global batch, and no multiple of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora_model(tmp_path_factory.mktemp("log_probs"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tuple[Tensor, Tensor]:
    """Of the model with and without its adapters."""
    with Wide(), torch.no_grad():
        model = their_model(folder)
        policy = their_log_probs(model, SAMPLES)
        with model.disable_adapter():
            return policy, their_log_probs(model, SAMPLES)


def _grpo() -> Any:
    """The loss of examples/grpo.py."""
    path = Path(__file__).parents[2] / "examples" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.grpo_loss


FEW = SAMPLES[:2]
NUMBERS = completion_numbers(FEW)
ADVANTAGES = torch.linspace(-1.5, 2.0, int(NUMBERS.max()) + 1, dtype=torch.float64)


def _loss(log_probs: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    loss: Tensor = _grpo()(log_probs, old, reference, ADVANTAGES, NUMBERS)
    return loss


def _old(log_probs: Tensor) -> Tensor:
    """As if another policy had sampled: some ratios are clipped, and others are not."""
    return log_probs + 0.3 * torch.sin(torch.arange(log_probs.numel(), dtype=torch.float64)).view_as(log_probs)


def _run(folder: Path, layout: dict[str, Any]) -> tuple[list[Tensor], float, float, dict[str, Tensor]]:
    """Log-probs with and without the adapters; loss, gradient norm, and gradients of the adapters of a step."""
    with memo.Trainer(config=lora_config(folder, **layout)) as trainer:
        log_probs = [trainer.log_probs(SAMPLES), trainer.log_probs(SAMPLES, reference=True)]
        assert torch.equal(trainer.log_probs(SAMPLES), log_probs[0]), "the adapters are on again"
        old, reference = _old(trainer.log_probs(FEW)), trainer.log_probs(FEW, reference=True)
        found = gradients_of_steps(trainer)
        record = trainer.step_on(FEW, lambda log_probs: _loss(log_probs, old, reference))
        assert (trainer.iteration, record.consumed_samples) == (1, 0)
        return log_probs, record.lm_loss, record.grad_norm, found


@pytest.fixture(scope="module")
def their_step(folder: Path) -> tuple[float, dict[str, Tensor]]:
    """The loss of GRPO, with ratios on both sides of both bounds, and its gradients by our names."""
    with Wide():
        model = their_model(folder)
        log_probs = their_log_probs(model, FEW)
        old = _old(log_probs.detach())
        with torch.no_grad(), model.disable_adapter():
            reference = their_log_probs(model, FEW)
        loss = _loss(log_probs, old, reference)
        loss.backward()
        tensors = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    ratios = (log_probs - old)[NUMBERS >= 0].exp()
    assert (ratios > 1.2).any() and (ratios < 0.8).any() and ((ratios - 1).abs() < 0.2).any()
    return loss.item(), our_gradients(folder, tensors)


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_log_probs_and_a_step_on_them_are_those_of_transformers(
    folder: Path,
    theirs: tuple[Tensor, Tensor],
    their_step: tuple[float, dict[str, Tensor]],
    world_size: int,
    layout: dict[str, Any],
) -> None:
    assert len(SAMPLES) % 2 and (theirs[0] - theirs[1]).abs().max() > 0.1
    ranks = run_ranks(world_size, _run, folder, layout)
    loss, gradients = their_step
    norm = float(torch.cat([grad.flatten() for grad in gradients.values()]).norm())
    for log_probs, found_loss, found_norm, _ in ranks:
        for ours, wanted in zip(log_probs, theirs, strict=True):
            assert ours.dtype == torch.float64 and ours.shape == (len(SAMPLES), 64)
            assert (ours - wanted).abs().max() <= BOUND * wanted.abs().max()
            assert (ours == 0).equal(wanted == 0)
        assert all(map(torch.equal, log_probs, ranks[0][0]))
        assert abs(found_loss - loss) <= BOUND * abs(loss)
        assert abs(found_norm - norm) <= BOUND * norm
    assert relative_error(assemble([found for *_, found in ranks]), gradients) <= BOUND


def _both_ways(folder: Path, layout: dict[str, Any]) -> tuple[Any, Any]:
    """Weights after a plain step, and after one on its loss as a function of log-probs."""
    found = []
    for is_own in (False, True):
        with memo.Trainer(config=lora_config(folder, **layout), train_data=_Given()) as trainer:
            if is_own:
                count = float(sum(sample.loss_mask.sum() for sample in FEW))
                record = trainer.step_on(FEW, lambda log_probs, count=count: -log_probs.sum() / count)
            else:
                record = trainer.step()
            found.append((record.grad_norm, global_pieces(trainer.parts, "master")))
    return found[0], found[1]


class _Given:
    seq_length = 64

    def sample(self, index: int) -> Sample:
        return FEW[index % len(FEW)]


@pytest.mark.parametrize(
    ("world_size", "layout"), [(1, {}), pytest.param(2, {"tp": 2, **SWAPPED}, marks=pytest.mark.full)], ids=str
)
def test_the_mean_of_losses_is_a_plain_step_to_the_bit(folder: Path, world_size: int, layout: dict[str, Any]) -> None:
    for (norm, weights), (own_norm, own_weights) in run_ranks(world_size, _both_ways, folder, layout):
        assert norm == own_norm
        assert all(own_weights[name].nan_to_num().equal(each.nan_to_num()) for name, each in weights.items())
