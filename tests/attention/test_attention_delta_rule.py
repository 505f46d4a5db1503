"""The gated delta net in chunks, against one token after the other, in fp64: outputs and all gradients to 1e-13 of the
largest; with documents that end anywhere, in any number of groups and of ranges that carry on from each other."""

import pytest
import torch
from delta_nets import BATCH, CHANNELS, DIM, DOCUMENTS, HEADS, TOKENS, expected, net, place, run

from memo.attention import delta_rule
from memo.attention.delta_rule import DeltaNet

BOUND = 1e-13


@pytest.mark.parametrize("group", [128, 512])
@pytest.mark.parametrize("ends", [(150,), (40, 150), (64, 128, 150)], ids=str)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_chunks_compute_what_tokens_one_after_the_other_do(
    documents: str, ends: tuple[int, ...], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_rule, "group_tokens", lambda heads, batch: group)
    wanted = expected(documents)
    found = run(net(), wanted.mixed, place(DOCUMENTS[documents]), ends, wanted.grad_out)
    assert wanted.is_found(*found, BOUND)


def test_other_documents_change_no_bit() -> None:
    """Outputs and gradients of a document, in bf16, where the tokens of the one before are others."""
    of = DeltaNet(*(x.bfloat16() for x in net()[:3]), DIM)
    places, own = place(((70, 80), (70, 80))), slice(70, None)
    mixed = torch.randn(TOKENS, BATCH, CHANNELS + 2 * HEADS).bfloat16()
    grad_out = torch.randn(TOKENS, BATCH, HEADS * DIM).bfloat16()
    grad_out[:70] = 0
    found = []
    for given in (mixed, torch.cat((-3 * mixed[:70], mixed[70:]))):
        out, gradients = run(of, given, places, (TOKENS,), grad_out)
        found.append((out[own], gradients.mixed[own], *gradients[2:]))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
