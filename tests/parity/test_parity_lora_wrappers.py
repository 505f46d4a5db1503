"""An adapter of a text in a model that sees images is found by PEFT, in the whole model of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_wrappers import WRAPPED, wrapper_class, write_wrapper
from hugging_face import needs
from layouts import tiny
from trainers import QUIET

import memo
from memo.checkpoint.hugging_face.adapters import read_adapters
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.config.hugging_face import read_config
from memo.config.model_name import choose_model

pytestmark = needs("transformers", "peft")
torch.set_num_threads(1)

_ATTENTION = {"lora_target_modules": "q_proj,k_proj,v_proj,o_proj"}
_LATENTS = {"lora_target_modules": "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"}
ATTENTION_ALONE = {"qwen3_5_moe": _ATTENTION, "qwen3_vl_moe": _ATTENTION, "mistral3-4": _LATENTS}
"""Where PEFT has no names for adapters beside other matrices."""


@pytest.mark.parametrize("name", WRAPPED)
def test_an_adapter_in_peft_is_the_merged_model(name: str, tmp_path: Path) -> None:
    """fp32, a relative error of 1e-5 in the L2 norm: both round. Measured: 2e-6."""
    import peft

    source = write_wrapper(name, tmp_path)
    lora: dict[str, Any] = {"lora_rank": 3, "lr": 3e-2, "train_iters": 3, **ATTENTION_ALONE.get(name, {})}
    config = choose_model(tiny(dtype="fp32"), source).override({**lora, "save": str(tmp_path / "run")})
    with memo.Trainer(config=config, **QUIET) as trainer:
        trainer.train()
    export_checkpoint(tmp_path / "run", tmp_path / "adapter")
    export_checkpoint(tmp_path / "run", tmp_path / "merged", merge_adapters=True, base=source)
    ids = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        merged, base = (wrapper_class(name).from_pretrained(each).eval() for each in (tmp_path / "merged", source))
        expected, untouched = merged(input_ids=ids).logits, base(input_ids=ids).logits
        found = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids).logits
    size = torch.linalg.norm(expected)
    assert torch.linalg.norm(found - expected) < 1e-5 * size < 1e-3 * torch.linalg.norm(untouched - expected)
    assert read_adapters(tmp_path / "adapter", config, read_config(source).model_type)
