"""Packed documents do not see each other: other tokens in one document leave the losses of all others as they were.

The same bits, in bf16, in models whose products have the same shapes whatever the tokens are. How many rows an expert
has depends on the tokens, also on those of other documents, and the sums of a product of other rows may be rounded
otherwise. So models with experts have the same losses to 1e-12, in fp64.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from layouts import make, tiny
from ranks import run_ranks
from torch import Tensor

from memo.data import SampleDataset
from memo.data.sample import Sample
from memo.model.transformer import Head, Microbatch

KINDS: dict[str, Any] = {"window_size": 7, "layer_types": "sliding,full", "attention_sinks": True}
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "full attention": ("llama-tiny", {"params_dtype": "bf16"}, 0.0),
    "window and sinks": ("llama-tiny", {"params_dtype": "bf16", **KINDS}, 0.0),
    "delta nets": ("qwen3.5-tiny", {"params_dtype": "bf16", "cp_comm_type": "a2a", "num_query_groups": 4}, 0.0),
    "latents": ("deepseek-tiny", {"params_dtype": "fp64", "moe_layer_freq": "[0]+[1]"}, 1e-12),
    "experts": ("qwen3-moe-tiny", {"params_dtype": "fp64"}, 1e-12),
    "experts with biases, window and sinks": ("gpt-oss-tiny", {"params_dtype": "fp64", **KINDS}, 1e-12),
}
"""Preset, flags, and the bound of differences."""


class OneDocumentChanged:
    """A dataset with other tokens in the documents of that number; labels stay."""

    def __init__(self, of: SampleDataset, document: int) -> None:
        self.of, self.document, self.seq_length = of, document, of.seq_length

    def sample(self, index: int) -> Sample:
        sample = self.of.sample(index)
        start, stop = sample.cu_seqlens[self.document : self.document + 2]
        tokens = sample.tokens.copy()
        tokens[start:stop] = (tokens[start:stop] + 17) % 61
        return replace(sample, tokens=tokens)


def losses_by_document(model: str, document: int | None, flags: dict[str, Any], world_size: int) -> dict[int, Tensor]:
    """Losses of this rank's tokens of one global batch, by the number of the document in its sample."""
    preset, own, _ = MODELS[model]
    parts, feed = make(tiny(preset, init_method_std=0.3, global_batch_size=1, **{**flags, **own}), world_size)
    if document is not None:
        feed.dataset = OneDocumentChanged(feed.dataset, document)  # type: ignore[assignment]
    ends = feed.peek()[0].documents
    assert ends is not None
    numbers = torch.cat([torch.full((stop - start,), n) for n, (start, stop) in enumerate(pairwise(ends[0]))])
    of_document = feed.in_shard_order(numbers.unsqueeze(0))
    found: list[Tensor] = []

    def read(head: Head, hidden: Tensor, batch: Microbatch, _: list[int]) -> None:
        found.append(head.token_losses(hidden, batch.labels))

    parts.at_head(feed, read)
    return {int(number): found[0][of_document == number] for number in of_document.unique()}


def all_losses(model: str, flags: dict[str, Any], world_size: int) -> list[dict[int, Tensor]]:
    """First of the samples as they are, then with each of their first documents changed."""
    return [losses_by_document(model, document, flags, world_size) for document in (None, 0, 1)]


def cases() -> Iterator[Any]:
    """Layers of experts are alike in all layouts, so over ranks they are full tests."""
    for model in MODELS:
        yield pytest.param(model, 1, {"offload_alpha": 0.5, "offload_tiles": 4}, id=f"{model}, alone")
        marks = [pytest.mark.full] * model.startswith("experts")
        yield pytest.param(model, 4, {"tp": 2, "cp": 2, "cp_comm_type": "p2p"}, id=f"{model}, tp2 cp2", marks=marks)


@pytest.mark.parametrize(("model", "world_size", "flags"), cases())
def test_a_document_leaves_all_others_as_they_were(model: str, world_size: int, flags: dict[str, Any]) -> None:
    bound, moved = MODELS[model][2], dict.fromkeys((0, 1), 0.0)
    for before, *after in run_ranks(world_size, all_losses, model, flags, world_size):
        assert len(before) > 2, "a rank should have tokens of documents that stay"
        for changed, losses in enumerate(after):
            for document, values in losses.items():
                difference = float((values.double() - before[document].double()).abs().max())
                if document == changed:
                    moved[changed] = max(moved[changed], difference)
                else:
                    assert difference <= bound, f"document {document}, when {changed} changes"
    assert min(moved.values()) > 0.1, "other tokens changed no loss of their own document"
