"""Peers report a row or what is missing, and FSDP2 on the host trains what plain torch trains."""

import dataclasses
import json
import sys
from pathlib import Path

import fsdp2
import peers
import pytest
import torch
from fsdp2 import Gpt, PlainGpt
from measure import in_fresh_process
from scales import SMOKE, Arguments

torch.set_num_threads(1)

GPT = Gpt(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64, seq_length=40, loss_chunk_size=16)


def plain_losses(gpt: Gpt) -> list[float]:
    torch.manual_seed(gpt.seed)
    model = PlainGpt(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(gpt.seed)
    tokens = torch.randint(0, gpt.vocab_size, (1, gpt.seq_length + 1), generator=generator)
    losses = []
    for _ in range(gpt.warmup + gpt.steps):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_states_on_the_host_change_no_loss() -> None:
    """fp32: at most 1e-5 apart after four steps; sums of norms are in another order."""
    script = Path(fsdp2.__file__)
    row = in_fresh_process([sys.executable, str(script), json.dumps(dataclasses.asdict(GPT))], 120.0)
    assert row["status"] == "ok", row
    expected = plain_losses(GPT)
    assert row["losses"] == pytest.approx(expected, abs=1e-5) and expected[-1] < expected[0] - 0.05
    weights = sum(parameter.numel() for parameter in PlainGpt(GPT).parameters())
    tensors = len(list(PlainGpt(GPT).parameters()))
    assert row["states_bytes"] == 3 * 4 * weights + 4 * tensors  # with two moments, and a step count a tensor
    assert row["tgs"] == pytest.approx(GPT.seq_length / row["step_p50_s"]) and len(row["steps_s"]) == GPT.steps
    assert row["host_peak_bytes"] > row["states_bytes"]


def test_fsdp2_trains_about_as_many_weights() -> None:
    case = peers.case_of(Arguments(SMOKE, float("inf")), "memo", SMOKE.peer, 512)
    gpt = peers.gpt_of(case)
    assert (gpt.num_layers, gpt.vocab_size, gpt.seq_length, gpt.steps) == (2, 512, 512, SMOKE.steps)
    assert gpt.hidden_size == case.model.hidden_size and gpt.num_attention_heads == case.model.num_attention_heads
