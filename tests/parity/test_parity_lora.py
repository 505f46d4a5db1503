"""LoRA is PEFT's: five steps of AdamW on transformers' model with PEFT's adapters, loss by loss, and what they become.

fp64 in both, with requests for fp32 turned into fp64. Losses agree to 1e-9 (measured: 2e-12) and adapters to 1e-6 of
the largest value: Adam divides by the root of the second moment, which magnifies the rounding of small gradients. Each
document of a packed sequence goes through their model by itself.
"""

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forward import loss_of
from hf_directories import load_model, write_model
from hugging_face import Wide, needs
from layouts import Outcome, make, relative_error, tiny, train
from lora_models import randomize_trained
from safetensors.torch import load_file, save_file
from torch import Tensor

from memo.checkpoint.directory import resolve_checkpoint
from memo.checkpoint.hugging_face.adapters import ADAPTER_CONFIG, ADAPTER_FILE, read_adapters
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.hugging_face.files import TensorFiles
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import open_checkpoint, save_checkpoint
from memo.config import RunConfig
from memo.config.hugging_face import read_config
from memo.config.identity import model_identity
from memo.config.model import Quantization
from memo.config.model_name import choose_model
from memo.errors import ConfigError
from memo.model.transformer import Microbatch
from memo.parallel.quantized import CodedBucket, Decoder
from memo.spec.buckets import BucketPlan, ParameterRange

pytestmark = needs("transformers", "peft")
torch.set_num_threads(1)

STEPS, RANK = 5, 3
LOSS_BOUND, WEIGHT_BOUND = 1e-9, 1e-6
FLAGS: dict[str, Any] = {"lora_rank": RANK, "lora_alpha": 5.0, "lr": 3e-3, "clip_grad": 0.5, "global_batch_size": 2}
Q_V = {"lora_target_modules": "q_proj,v_proj", "lora_use_rslora": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "q and v": ("qwen3", Q_V),
    "fused": ("gpt2", {}),  # q, k and v are one matrix of theirs, stored as [in, out]
    "experts": ("qwen3_moe", {}),
    "experts of Mixtral": ("mixtral", {"lora_target_modules": "q_proj,gate_proj,up_proj,down_proj"}),
    "4 bits": ("llama", {"quantize": "nf4"}),
    "latents": (
        "deepseek_v3",
        {"lora_target_modules": "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"},
    ),
    "delta nets": ("qwen3_5_text", {}),  # rows of queries and gates take turns in one of theirs
}
"""A family, and flags."""
OF_EXPERTS = {
    "experts": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "experts of Mixtral": ["q_proj", "w1", "w2", "w3"],
}
"""Their names of matrices with adapters."""
LAYOUTS: list[Any] = [
    ("q and v", 1, {}),
    ("fused", 1, {}),
    ("delta nets", 1, {}),
    ("4 bits", 2, {"pp": 2}),
    ("llama", 2, {"tp": 2}),
    pytest.param("llama", 2, {"cp": 2}, marks=pytest.mark.full),
    pytest.param("llama", 2, {"pp": 2}, marks=pytest.mark.full),
    ("llama", 2, {"data_parallel_sharding_strategy": "optim_grads_params", "micro_batch_size": 1}),
    ("llama", 1, {"offload_alpha": 0.5, "offload_granularity": "tile", "offload_tiles": 8, "offload_slot_tiles": 2}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each case, with the model and an adapter that PEFT has saved, whose B is not zero."""
    root = tmp_path_factory.mktemp("lora")
    for case, (family, flags) in CASES.items():
        directory = write_model(family, root / case, torch.float64)
        if "quantize" in flags:
            _write_in_bits(directory, flags["quantize"])
        if case in OF_EXPERTS:
            _write_adapter(directory, OF_EXPERTS[case], root / case / "adapter")
        else:
            _theirs(directory, flags).save_pretrained(root / case / "adapter")
    return root


def _write_adapter(directory: Path, targets: list[str], adapter: Path) -> None:
    """As PEFT wrote it where each expert's matrices were modules."""
    generator, tensors = torch.Generator().manual_seed(3), dict[str, Tensor]()
    for name, weight in load_file(directory / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            for kind, size in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                values = 0.2 * torch.randn(size, generator=generator, dtype=torch.float64)
                tensors[f"base_model.model.{module}.lora_{kind}.weight"] = values
    adapter.mkdir()
    save_file(tensors, adapter / ADAPTER_FILE)
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": FLAGS["lora_alpha"]}
    (adapter / ADAPTER_CONFIG).write_text(json.dumps({**facts, "target_modules": targets}))


def _base(directory: Path, flags: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Their model, within `Wide`; its matrices of layers as they are made again from few bits."""
    return load_model(directory.parent / "in bits" if "quantize" in flags else directory)


def _write_in_bits(directory: Path, quantize: Quantization) -> None:
    """The same model beside it, with those of its matrices of layers that few bits make."""
    target = directory.parent / "in bits"
    shutil.copytree(directory, target)
    tensors = load_file(directory / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            plan = BucketPlan(
                (ParameterRange("w", tuple(weight.shape), 0),), weight.numel(), 1, "", frozen=True, coded=True
            )
            bucket = CodedBucket(plan, quantize, torch.device("cpu"))
            bucket.encode(weight.flatten())
            Decoder(weight.numel(), torch.device("cpu")).decode(bucket, weight.view(-1))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def _theirs(directory: Path, flags: dict[str, Any]) -> Any:
    """Their model with new adapters, which are random."""
    import peft

    with Wide():
        base = _base(directory, flags)
        named = [name for name, module in base.named_modules() if _is_target(name, module, flags)]
        config = peft.LoraConfig(
            r=RANK,
            lora_alpha=FLAGS["lora_alpha"],
            use_rslora=flags.get("lora_use_rslora", False),
            target_modules=named,
            fan_in_fan_out="gpt2" in directory.name,
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    randomize_trained(model)
    return model


def _is_target(name: str, module: Any, flags: dict[str, Any]) -> bool:
    import transformers

    wanted = flags.get("lora_target_modules")
    if wanted is not None:
        return name.rpartition(".")[2] in wanted.split(",")
    is_matrix = isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D)
    return is_matrix and "lm_head" not in name and not name.endswith(("mlp.gate", "shared_expert_gate"))


def _config(folder: Path, case: str, **layout: Any) -> RunConfig:
    family, flags = CASES[case]
    lora = {**FLAGS, **flags, "lora_checkpoint": str(folder / case / "adapter")}
    return choose_model(tiny(dtype="fp64"), folder / case / family).override({**lora, **layout})


def _their_loss(model: Any, batch: Microbatch) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row in range(batch.tokens.shape[1]):
        bounds = (0, len(batch.tokens)) if batch.documents is None else batch.documents[row]
        for start, stop in itertools.pairwise(bounds):
            own = (slice(start, stop), row)
            logits = model(input_ids=batch.tokens[own][None].long(), use_cache=False).logits[0]
            losses = F.cross_entropy(logits, batch.labels[own].long(), reduction="none")
            total = total + (losses * batch.loss_weight[own]).sum()
    return total


def _train_theirs(folder: Path, case: str, batches: list[list[Microbatch]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses; and the adapters by the names in PEFT's file."""
    import peft

    training = _config(folder, case).training
    family, flags = CASES[case]
    with Wide():
        model = peft.PeftModel.from_pretrained(
            _base(folder / case / family, flags),
            folder / case / "adapter",
            is_trainable=True,
            autocast_adapter_dtype=False,
        )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        adam = torch.optim.AdamW(
            trained,
            lr=training.lr,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            weight_decay=training.weight_decay,
        )
        losses = []
        for step in batches:
            adam.zero_grad()
            loss = sum((_their_loss(model, batch) for batch in step), torch.zeros(()))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, training.clip_grad)
            adam.step()
            losses.append(float(loss))
        return losses, peft.get_peft_model_state_dict(model)


def _their_directory(folder: Path, case: str, tensors: dict[str, Tensor], target: Path) -> Path:
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / ADAPTER_FILE)
    (target / ADAPTER_CONFIG).write_bytes((folder / case / "adapter" / ADAPTER_CONFIG).read_bytes())
    return target


@pytest.fixture(scope="module")
def theirs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a case their losses, and their adapters after training by our names."""
    known: dict[str, tuple[list[float], dict[str, Tensor]]] = {}

    def of(case: str) -> tuple[list[float], dict[str, Tensor]]:
        if case not in known:
            _, feed = make(_config(folder, case), 1)
            losses, tensors = _train_theirs(folder, case, [feed.next_global_batch() for _ in range(STEPS)])
            directory = _their_directory(folder, case, tensors, tmp_path_factory.mktemp("trained") / "adapter")
            config = _config(folder, case)
            model_type = read_config(str(config.checkpoint.pretrained_checkpoint)).model_type
            known[case] = losses, read_adapters(directory, config, model_type)
        return known[case]

    return of


@pytest.mark.parametrize(("case", "world_size", "layout"), LAYOUTS, ids=str)
def test_training_is_that_of_peft(
    folder: Path, theirs: Any, case: str, world_size: int, layout: dict[str, Any]
) -> None:
    """Where a family fuses matrices their parts share one A there, and have one each here: the first loss is equal."""
    losses, adapters = theirs(case)
    is_fused = case in ("fused", "delta nets")
    found: Outcome = train(_config(folder, case, **layout), world_size, 1 if is_fused else STEPS)
    for ours, wanted in zip(found.losses, losses, strict=False):
        assert abs(ours - wanted) <= LOSS_BOUND * abs(wanted)
    assert adapters.keys() == found.weights.keys() and len({*losses}) == STEPS
    if not is_fused:
        assert relative_error(found.weights, adapters) <= WEIGHT_BOUND


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("experts", {"offload_alpha": 0.5}),
        ("experts", {"tp": 2}),
        ("experts of Mixtral", {}),
        ("experts of Mixtral", {"pp": 2}),
    ],
    ids=str,
)
def test_gradients_of_experts_are_those_of_peft(folder: Path, case: str, layout: dict[str, Any]) -> None:
    """PEFT has the adapters of all experts in one tensor, with twice the rank where two matrices are one: where their
    values lie in it, their gradients do."""
    import peft

    family, _ = CASES[case]
    (batches,) = [make(_config(folder, case), 1)[1].next_global_batch()]
    with Wide():
        model = peft.PeftModel.from_pretrained(
            _base(folder / case / family), folder / case / "adapter", is_trainable=True, autocast_adapter_dtype=False
        )
        loss = sum((_their_loss(model, batch) for batch in batches), torch.zeros(()))
        loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    values, grads = (torch.cat([x.flatten() for x in of]) for of in (trained, [p.grad for p in trained]))
    place = {value: index for index, value in enumerate(values.tolist())}
    config = _config(folder, case, **{**layout, "clip_grad": 0.0})
    adapters = read_adapters(folder / case / "adapter", config, read_config(folder / case / family).model_type)
    wanted = {name: grads[[place[v] for v in x.flatten().tolist()]].view_as(x) for name, x in adapters.items()}
    found = train(config, max(1, *layout.values()) if layout.keys() & {"tp", "pp"} else 1, 1)
    assert abs(found.losses[0] - float(loss)) <= LOSS_BOUND * float(loss)
    assert relative_error(found.gradients, wanted) <= LOSS_BOUND


def _saved(config: RunConfig, run: Path) -> tuple[float, list[Microbatch]]:
    """Train three steps, save, and return the loss of the next ones with the microbatches of it."""
    model, feed = make(config, 1)
    for _ in range(3):
        model.forward_backward(feed.next_global_batch())
        model.optimizer.step(config.training.lr)
    base = TensorFiles(str(config.checkpoint.pretrained_checkpoint)).fingerprint()
    state = RunState(3, 0, 1, 0, 3, 3, model=model_identity(config), base=base)
    save_checkpoint(run, state, model.optimizer.segment_states(), model.mesh)
    (run / "config.toml").write_text(config.to_toml())
    batches = feed.next_global_batch()
    return float(loss_of(model, batches)), batches


@pytest.mark.parametrize("case", [case for case, (_, flags) in CASES.items() if "quantize" not in flags])
def test_an_export_is_what_peft_and_transformers_load(folder: Path, tmp_path: Path, case: str) -> None:
    """Adapters alone in PEFT, and merged into the weights in transformers: the loss is ours, to 1e-9."""
    import peft

    config = _config(folder, case)
    loss, batches = _saved(config, tmp_path / "run")
    family, _ = CASES[case]
    exported = export_checkpoint(tmp_path / "run", tmp_path / "adapter")
    merged = export_checkpoint(tmp_path / "run", tmp_path / "merged", merge_adapters=True, base=folder / case / family)
    assert exported.files == [ADAPTER_FILE] and merged.num_bytes > 2 * exported.num_bytes
    with Wide():
        base = _base(folder / case / family)
        untouched = sum(float(_their_loss(base, batch)) for batch in batches)
        model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
        alone = sum(float(_their_loss(model, batch)) for batch in batches)
        whole = _base(tmp_path / "merged")
        together = sum(float(_their_loss(whole, batch)) for batch in batches)
    assert abs(alone - loss) <= LOSS_BOUND * loss and abs(together - loss) <= LOSS_BOUND * loss
    assert abs(untouched - loss) > 1e-3 * loss
    again = read_adapters(tmp_path / "adapter", config, read_config(folder / case / family).model_type)
    first = read_adapters(folder / case / "adapter", config, read_config(folder / case / family).model_type)
    assert again.keys() == first.keys() and all(not again[name].equal(first[name]) for name in first)
    assert (
        load_file(tmp_path / "adapter" / ADAPTER_FILE).keys()
        == load_file(folder / case / "adapter" / ADAPTER_FILE).keys()
    )


def test_a_run_in_4_bits_is_merged_into_the_model_that_it_started_from(folder: Path, tmp_path: Path) -> None:
    """Its checkpoint has adapters alone; these alone give its loss beside what 4 bits made of them."""
    import peft

    config, (family, flags) = _config(folder, "4 bits"), CASES["4 bits"]
    directory = folder / "4 bits" / family
    loss, batches = _saved(config, tmp_path / "run")
    stored = open_checkpoint(resolve_checkpoint(tmp_path / "run"))[1]
    assert all("lora_" in name for name in stored) and "master/layers.0.mlp.fc2.lora_A.weight" in stored
    export_checkpoint(tmp_path / "run", tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"no weights that its run had frozen: name the .* with --base"):
        export_checkpoint(tmp_path / "run", tmp_path / "merged", merge_adapters=True)
    export_checkpoint(tmp_path / "run", tmp_path / "merged", merge_adapters=True, base=directory)
    with Wide():
        model = peft.PeftModel.from_pretrained(
            _base(directory, flags), tmp_path / "adapter", autocast_adapter_dtype=False
        )
        assert abs(sum(float(_their_loss(model, batch)) for batch in batches) - loss) <= LOSS_BOUND * loss
        whole = peft.PeftModel.from_pretrained(_base(directory), tmp_path / "adapter", autocast_adapter_dtype=False)
        merged, ours = whole.merge_and_unload().state_dict(), _base(tmp_path / "merged").state_dict()
    assert ours.keys() == merged.keys()
    assert all((ours[name] - merged[name]).abs().max() <= LOSS_BOUND for name in merged)
