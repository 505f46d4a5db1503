"""A tiny Llama of transformers with adapters of PEFT that are not zero, in fp64, as files and in memory."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hf_directories import VOCAB, load_model, write_model
from hugging_face import Wide
from layouts import global_pieces, tiny
from safetensors.torch import save_file
from torch import Tensor, nn
from trainers import QUIET

import memo
from memo.checkpoint.hugging_face.adapters import ADAPTER_CONFIG, ADAPTER_FILE, read_adapters
from memo.config import RunConfig
from memo.config.hugging_face import read_config
from memo.config.model_name import choose_model
from memo.data import Sample, pack_completions

RANK, ALPHA = 3, 5.0
FAMILY = "llama"


def write_lora_model(root: Path) -> Path:
    """Write the model to root/llama and the adapter to root/adapter; return `root`."""
    import peft

    directory = write_model(FAMILY, root, torch.float64)
    with Wide():
        base = load_model(directory)
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    randomize_trained(model)
    model.save_pretrained(root / "adapter")
    return root


@torch.no_grad()
def randomize_trained(model: nn.Module) -> None:
    """Give trained parameters random values, equal in every process."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def gradients_of_steps(trainer: memo.Trainer) -> dict[str, Tensor]:
    """This rank's pieces of the gradients that the next step of a Trainer applies; empty before it."""
    optimizer, found = trainer.parts.optimizer, dict[str, Tensor]()
    update = optimizer.step

    def kept(*args: Any) -> Any:
        found.update(global_pieces(trainer.parts, "grad"))
        return update(*args)

    optimizer.step = kept  # type: ignore[method-assign]
    return found


def lora_config(root: Path, **flags: Any) -> RunConfig:
    """Return the configuration of a run that starts from the model and the adapter."""
    lora = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_checkpoint": str(root / "adapter"), "clip_grad": 0.0}
    config = choose_model(tiny(dtype="fp64"), root / FAMILY)
    return config.override({**lora, **QUIET, "global_batch_size": 2, **flags})


def their_model(root: Path) -> Any:
    """Return the model with its trainable adapters; call it within `Wide`."""
    import peft

    return peft.PeftModel.from_pretrained(
        load_model(root / FAMILY), root / "adapter", is_trainable=True, autocast_adapter_dtype=False
    )


def their_log_probs(model: Any, samples: Sequence[Sample]) -> Tensor:
    """Return log-probs [samples, s] from all logits of a document at once; 0 where a label does not count.

    Call it within `Wide`."""
    rows = []
    for sample in samples:
        parts = []
        for start, stop in itertools.pairwise(sample.cu_seqlens.tolist()):
            tokens, labels = (torch.from_numpy(ids[start:stop]) for ids in (sample.tokens, sample.labels))
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            of_labels = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
            parts.append(of_labels * (torch.from_numpy(sample.loss_mask[start:stop]) > 0))
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def our_gradients(root: Path, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients of PEFT's parameters by memo's names, read like an adapter's file."""
    target = root / "gradients"
    target.mkdir(exist_ok=True)
    (target / ADAPTER_CONFIG).write_bytes((root / "adapter" / ADAPTER_CONFIG).read_bytes())
    save_file({name.replace(".default", ""): grad for name, grad in gradients.items()}, target / ADAPTER_FILE)
    return read_adapters(target, lora_config(root), read_config(str(root / FAMILY)).model_type)


def some_samples(num_documents: int, seq_length: int = 64) -> list[Sample]:
    """Return packed random prompts and completions; every token of the completions counts."""
    random, documents = np.random.default_rng(5), []
    for _ in range(num_documents):
        prompt, completion = random.integers(1, 12, 2)
        marks = [0] * int(prompt) + [1] * int(completion)
        documents.append((random.integers(0, VOCAB, len(marks)).tolist(), marks))
    return pack_completions(documents, seq_length, fill=2)
