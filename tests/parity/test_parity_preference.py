"""DPO and IPO have the loss and the gradients of TRL's formulas on transformers' model with PEFT's adapters.

Of TRL 1.16.0, trl/trainer/dpo_trainer.py, _compute_loss: log-probs are summed over the tokens of a completion;
"sigmoid" is -logsigmoid(beta * delta_score), "ipo" (ipo_delta - 1 / (2 * beta)) ** 2 of log-ratios that are divided by
the tokens of their completions; both are averaged over pairs. The reference is the model with its adapters disabled.
fp64 in both, with requests for fp32 turned into fp64; agreement to 1e-9. TRL itself agrees with the formulas, to 1e-6
in gradients, since its fused head has these in fp32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf_directories import VOCAB
from hugging_face import Wide, needs
from layouts import assemble, relative_error
from lora_models import gradients_of_steps, lora_config, our_gradients, their_model, write_lora_model
from pairs import Answer, open_pairs, some_pairs, write_pairs
from ranks import run_ranks
from torch import Tensor

import memo

pytestmark = needs("transformers", "peft")
torch.set_num_threads(1)

BOUND, BETA, BATCH, LENGTH = 1e-9, 0.3, 4, 64
SWAPPED = {"offload_alpha": 0.5, "offload_granularity": "tile", "offload_tiles": 8, "offload_slot_tiles": 2}
CASES: list[Any] = [
    ("dpo", 1, {}),
    ("ipo", 1, {"micro_batch_size": 2, "packing": False}),
    pytest.param("dpo", 2, {"tp": 2, **SWAPPED}, marks=pytest.mark.full),  # test_parity_log_probs.py has tp and pp
    ("ipo", 2, {"cp": 2}),  # which divides by lengths of completions that lie on both ranks
    pytest.param("dpo", 2, {"pp": 2}, marks=pytest.mark.full),
    ("ipo", 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),  # chosen on one rank, rejected on the other
]
"""Losses differ on the log-probs of whole completions, which all layouts have alike."""
PAIRS = some_pairs(12, VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_lora_model(tmp_path_factory.mktemp("preference"))
    write_pairs(folder / "pairs", PAIRS, VOCAB)
    return folder


def _their_log_probs(model: Any, answers: list[Answer]) -> Tensor:
    """The sum over the tokens of each completion, [answers]."""
    found = []
    for ids, prompt in answers:
        tokens = torch.from_numpy(ids)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        of_tokens = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found.append(of_tokens[prompt - 1 :].sum())
    return torch.stack(found)


def _their_loss(model: Any, kind: str, numbers: list[int]) -> tuple[Tensor, dict[str, float]]:
    """The loss of these pairs as TRL computes it, and what it logs."""
    chosen, rejected = ([PAIRS[number][side] for number in numbers] for side in (0, 1))
    chosen_logps, rejected_logps = _their_log_probs(model, chosen), _their_log_probs(model, rejected)
    with torch.no_grad(), model.disable_adapter():
        ref_chosen_logps, ref_rejected_logps = _their_log_probs(model, chosen), _their_log_probs(model, rejected)
    chosen_logratios = chosen_logps - ref_chosen_logps
    rejected_logratios = rejected_logps - ref_rejected_logps
    if kind == "dpo":
        delta_score = chosen_logratios - rejected_logratios
        per_sequence_loss = -F.logsigmoid(BETA * delta_score)
    else:
        chosen_lengths, rejected_lengths = (
            torch.tensor([len(ids) - prompt for ids, prompt in answers]) for answers in (chosen, rejected)
        )
        ipo_delta = chosen_logratios / chosen_lengths - rejected_logratios / rejected_lengths
        per_sequence_loss = (ipo_delta - 1 / (2 * BETA)) ** 2
    rewards = BETA * chosen_logratios.detach(), BETA * rejected_logratios.detach()
    logged = {
        "rewards_chosen": rewards[0].mean().item(),
        "rewards_rejected": rewards[1].mean().item(),
        "rewards_margins": (rewards[0] - rewards[1]).mean().item(),
        "rewards_accuracies": (rewards[0] > rewards[1]).double().mean().item(),
    }
    return per_sequence_loss.mean(), logged


def test_the_formulas_are_what_trl_computes(folder: Path, tmp_path: Path) -> None:
    """TRL's trainer on the same pairs, prompts included once for both sides."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    numbers = list(range(5))
    rows = []
    for chosen, rejected in (PAIRS[number] for number in numbers):
        sides = {"chosen_ids": chosen[0][chosen[1] :].tolist(), "rejected_ids": rejected[0][rejected[1] :].tolist()}
        rows.append({"prompt_ids": chosen[0][: chosen[1]].tolist(), **sides})
    words = Tokenizer(models.WordLevel({"none": 0}, unk_token="none"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="none", eos_token="none")
    unread = datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    for kind, theirs in (("dpo", "sigmoid"), ("ipo", "ipo")):
        with Wide():
            model, same = their_model(folder), their_model(folder)
            loss, logged = _their_loss(same, kind, numbers)
            loss.backward()
            flags = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False}
            args = trl.DPOConfig(str(tmp_path), beta=BETA, loss_type=[theirs], **flags)
            trainer = trl.DPOTrainer(model, args=args, train_dataset=unread, processing_class=tokenizer)
            trainer.model.delete_adapter("ref")  # the adapters at the start, which TRL takes if they are not new
            found = trainer._compute_loss(trainer.model, trainer.data_collator(rows), False)
            found.backward()
        assert abs(found.item() - loss.item()) <= BOUND * abs(loss.item())
        for name, wanted in logged.items():
            (told,) = trainer._metrics["train"][name.replace("_", "/")]
            assert told == pytest.approx(wanted, rel=1e-6), name
        of_trl, of_formulas = (
            torch.cat([p.grad.flatten() for p in of.parameters() if p.requires_grad]) for of in (model, same)
        )
        assert (of_trl - of_formulas).norm() <= 1e-6 * of_formulas.norm() > 0


def _first_step(folder: Path, kind: str, layout: dict[str, Any]) -> tuple[dict[str, Any], list[int], dict[str, Tensor]]:
    """The record, the pairs of the step, and gradients of the adapters."""
    flags = {"preference": kind, "preference_beta": BETA, "global_batch_size": BATCH, "mock_data": False, **layout}
    data = open_pairs(str(folder / "pairs"), LENGTH, packing=layout.get("packing", True))
    with memo.Trainer(config=lora_config(folder, **flags), train_data=data) as trainer:
        found = gradients_of_steps(trainer)
        record = trainer.step()
        assert record.consumed_samples == BATCH
        pairs = [pair for index in range(0, BATCH, 2) for pair in data.groups(index)]
        return vars(record), pairs, found


@pytest.mark.parametrize(("kind", "world_size", "layout"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_trl(folder: Path, kind: str, world_size: int, layout: dict[str, Any]) -> None:
    ranks = run_ranks(world_size, _first_step, folder, kind, layout)
    _, pairs, _ = ranks[0]
    assert len(pairs) == 2 if "packing" in layout else len(pairs) > 4
    with Wide():
        model = their_model(folder)
        loss, logged = _their_loss(model, kind, pairs)
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
    for record, own_pairs, _ in ranks:
        assert own_pairs == pairs
        for name, wanted in {**logged, "lm_loss": loss.item(), "grad_norm": norm}.items():
            assert abs(record[name] - wanted) <= BOUND * abs(wanted), name
    assert relative_error(assemble([found for *_, found in ranks]), our_gradients(folder, grads)) <= BOUND
    assert np.isfinite(norm) and norm > 1e-3
