"""The question to the search, read and checked: a model, a batch and the machines that train the model."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from memo.artifacts.reading import Source, read_json_object
from memo.config import DataConfig, ModelConfig, RunConfig, TrainingConfig, preset
from memo.config.check_model import check_model
from memo.config.checks import check_preference
from memo.config.derived import default_lr_of, trains_adapters_alone
from memo.config.flag_table import dashed
from memo.config.hugging_face import CONFIG_FILE, download_hint, has_weights, model_of
from memo.config.model import CHOICES_OF_TRAINED, Quantization
from memo.config.model_name import check_planned_model
from memo.config.presets import preset_name
from memo.config.require import require_count, require_gib
from memo.config.run import HardwareConfig, KernelSet
from memo.config.training import MomentDtype, Preference
from memo.errors import ConfigError
from memo.estimate.accounts import Account
from memo.estimate.attention_rates import device_of
from memo.estimate.cases import DEFAULT_SEQ_LEN, model_shape
from memo.estimate.disks import NVME_PATH, with_disks
from memo.estimate.hardware import Hardware
from memo.estimate.machines import named_hardware, require_full_nodes
from memo.estimate.node_share import part_of_node, share_of_node, share_text
from memo.estimate.prices import PRICES, Price
from memo.estimate.unseen_memory import links_of
from memo.estimate.verdict import Capacity, MemoryLimits
from memo.spec.foreseen_kernels import foreseen_kernels
from memo.spec.parameters import check_patterns_of
from memo.spec.shapes import ModelShape, shape_of
from memo.units import GIB

PlaceStates = Literal["auto", "never"]
_CHOICES = {
    "place_states": PlaceStates,
    "exp_avg_dtype": MomentDtype,
    "exp_avg_sq_dtype": MomentDtype,
    "quantize": Quantization,
    "preference": Preference,
}
"""Arguments of `ask` that are one of a few words, and the words."""


@dataclass(frozen=True)
class PlannedModel:
    """A model as the search sees it.

    Attributes:
        shape: the model whose parameters are counted.
        sizes: the model whose layers are timed: the nearest one that memo can run, with a vocabulary.
        run: the model of `memo train`; None for a model that memo can only plan for.
        pretrained: directory with the weights from which the run starts; None: new weights.
        has_weights: whether this directory has weights; a plan needs only its config.json.
        why_not: why there is no `run`.
        changes: fields of ModelConfig that differ from those of the named model.
    """

    name: str
    shape: ModelShape
    sizes: ModelConfig
    run: ModelConfig | None
    pretrained: str | None = None
    has_weights: bool = False
    why_not: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """Which layout trains `model` fastest?

    The other attributes are the flags of `memo plan` of these names.

    Attributes:
        hardware: the machine, with the GPUs' part of each node.
        node: the machine, with whole nodes.
        host_is_given: whether the user stated the host memory, so that the run is bounded to it.
        nvme_path: directory of the node's disks in a run that needs them, if the hardware has disks.
        price: price of a GPU; None if none is known.
    """

    model: PlannedModel
    gpus: int
    seq_len: int
    global_batch_size: int
    hardware: Hardware
    node: Hardware
    gpu_memory_gib: float
    host_memory_gib: float
    host_is_given: bool = False
    place_states: PlaceStates = "auto"
    clip_grad: float = TrainingConfig.clip_grad
    exp_avg_dtype: MomentDtype = TrainingConfig.exp_avg_dtype
    exp_avg_sq_dtype: MomentDtype = TrainingConfig.exp_avg_sq_dtype
    deterministic: bool = False
    kernels: KernelSet = HardwareConfig.kernels
    preference: Preference | None = None
    nvme_path: str = NVME_PATH
    price: Price | None = None

    @cached_property
    def capacity(self) -> Capacity:
        return Capacity(self.gpu_memory_gib * GIB, self.host_memory_gib * GIB)

    @cached_property
    def limits(self) -> MemoryLimits:
        """The memory that surely suffices for what fits in it."""
        return MemoryLimits(
            self.capacity.sure_gpu_bytes,
            self.capacity.sure_host_bytes,
            self.hardware.local_ranks(self.gpus),
            self.hardware.nvme_budget_bytes or math.inf,
            links_of(self.hardware),
        )

    @cached_property
    def account(self) -> Account:
        return Account("memo", self.model.shape, self.gpus, links=links_of(self.hardware))

    @cached_property
    def base(self) -> RunConfig:
        """The run without a layout."""
        return RunConfig(
            model=self.model.sizes,
            training=TrainingConfig(
                global_batch_size=self.global_batch_size,
                params_dtype="bf16",
                clip_grad=self.clip_grad,
                exp_avg_dtype=self.exp_avg_dtype,
                exp_avg_sq_dtype=self.exp_avg_sq_dtype,
                preference=self.preference,
            ),
            data=DataConfig(seq_length=self.seq_len, reference_log_probs=self._reference),
            hardware=device_of(self.hardware, self.model.sizes, self.deterministic, self.kernels),
        )

    @cached_property
    def runs(self) -> dict[object, RunConfig]:
        """Cache of `memo.search.candidates.config_of`: its configurations by its arguments."""
        return {}

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.seq_len * self.global_batch_size

    def dollars(self, seconds: float) -> float | None:
        """Return the price of all GPUs for a time; None if no price is known."""
        return None if self.price is None else self.price.dollars_per_gpu_hour * self.gpus * seconds / 3600

    @property
    def node_share(self) -> float:
        """The part of each node that the run gets."""
        return share_of_node(self.node, self.gpus, self.host_memory_gib if self.host_is_given else None)

    @property
    def node_share_text(self) -> str:
        """The assumptions about a node that the run gets only in part; empty if the run gets whole nodes."""
        return share_text(self.node, self.gpus, self.host_memory_gib if self.host_is_given else None)

    @property
    def foreseen_kernels(self) -> str | None:
        """The kernels that are foreseen although a run may take others; None if there are none."""
        return foreseen_kernels(self.base.model)

    @property
    def weights_text(self) -> str:
        """The weights from which a run starts, and its default learning rate."""
        directory = self.model.pretrained
        rate = default_lr_of(self.model.sizes, directory is not None, self.preference)
        if directory is None:
            return f"weights: new; by default {rate}"
        if self.model.has_weights:
            return f"weights: from {directory}; by default {rate}"
        return (
            f"weights: from {directory}, which has none yet: before training, {download_hint(directory)}, or train new "
            "ones with --pretrained-checkpoint None"
        )

    def with_gpus(self, gpus: int) -> "Question":
        """Return the question for another number of GPUs, with their part of the nodes unless the user stated it."""
        part = part_of_node(self.node, gpus, self.host_memory_gib if self.host_is_given else None)
        own = self.hardware
        machine = replace(part, nvme_gib=own.nvme_gib, nvme_gb_per_s=own.nvme_gb_per_s)
        return replace(self, gpus=gpus, hardware=machine, host_memory_gib=part.host_memory_gib)

    @property
    def _reference(self) -> str | None:
        """The file of the reference's log-probs in commands, where the run needs one."""
        return None if self.preference is None or trains_adapters_alone(self.model.sizes) else "REFERENCE"

    def at_length(self, seq_len: int) -> "Question":
        """Return the question for another length. Raises ConfigError if the model has no positions for it."""
        if self.model.sizes.position_embedding_type != "learned_absolute":
            return replace(self, seq_len=seq_len)  # the model does not depend on the length
        return replace(self, model=planned_model(self.model.name, seq_len, self.model.changes), seq_len=seq_len)


def ask(
    model: str,
    gpus: int,
    *,
    seq_len: int = DEFAULT_SEQ_LEN,
    global_batch_size: int | None = None,
    hardware: str | Hardware = "",
    gpu_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    nvme_gib: float | None = None,
    nvme_gb_per_s: float | None = None,
    price_per_gpu_hour: float | None = None,
    **others: Any,
) -> Question:
    """Read a question. Defaults: one sequence for each GPU, and one more if pairs of answers need an even number; the
    memory, the disks and the price of the hardware.

    `others`: fields of ModelConfig in which the model differs from the named one, and further fields of `Question`.

    Raises ConfigError for an unknown model or machine, a size that is not above 0, sequences for which the model has no
    positions, and GPUs that do not fill their nodes.
    """
    require_count("--gpus", gpus)
    require_count("--seq-len", seq_len)
    if global_batch_size is not None:
        require_count("--global-batch-size", global_batch_size)
    sizes = {"--gpu-memory-gib": gpu_memory_gib, "--host-memory-gib": host_memory_gib, "--nvme-gib": nvme_gib}
    for flag, size in {**sizes, "--nvme-gb-per-s": nvme_gb_per_s}.items():
        if size is not None:
            require_gib(flag, size)
    if price_per_gpu_hour is not None and not 0 < price_per_gpu_hour < math.inf:
        raise ConfigError(f"--price-per-gpu-hour is {price_per_gpu_hour:g}: give dollars above 0, such as 2.5")
    preference = others.get("preference")
    chosen = {**others, "preference": preference or "dpo"}
    for name, kind in _CHOICES.items():
        if chosen.get(name, get_args(kind)[0]) not in get_args(kind):
            raise ConfigError(f"{dashed(name)} is {chosen[name]!r}: use {', '.join(get_args(kind))}")
    machine = hardware
    if not isinstance(machine, Hardware):
        machine = named_hardware("--hardware", machine, gpu_memory_gib)
    require_full_nodes("--hardware", gpus, machine)
    node = machine
    machine = with_disks(part_of_node(node, gpus, host_memory_gib), nvme_gib, nvme_gb_per_s)
    changes = {name: others.pop(name) for name in ("custom_layer", *CHOICES_OF_TRAINED) if name in others}
    question = Question(
        model=planned_model(model, seq_len, changes),
        gpus=gpus,
        seq_len=seq_len,
        global_batch_size=global_batch_size or gpus + (gpus % 2 if preference is not None else 0),
        hardware=machine,
        node=node,
        gpu_memory_gib=gpu_memory_gib or machine.memory_gib,
        host_memory_gib=machine.host_memory_gib,
        host_is_given=host_memory_gib is not None,
        price=PRICES.get(machine.name) if price_per_gpu_hour is None else Price(price_per_gpu_hour, "as given"),
        **others,
    )
    check_model(question.base)
    if preference is not None:
        check_preference(question.base, question.global_batch_size)
    check_patterns_of(question.base.model, question.base.data.seq_length)
    return question


def planned_model(name: str, seq_len: int, changes: Mapping[str, Any]) -> PlannedModel:
    """Return the model of a preset, or of a config.json of Hugging Face (a file or its directory).

    `changes`: values of fields of ModelConfig that replace the model's. Raises ConfigError."""
    model = _named_model(name, seq_len)
    changes = {key: value for key, value in changes.items() if value != getattr(ModelConfig, key)}
    if not changes:
        return model
    if model.run is None:
        key, value = next(iter(changes.items()))
        raise ConfigError(
            f"{dashed(key)} {value} conflicts with --model {name}, which memo can only plan for: give a preset, or a "
            "model that memo trains"
        )
    sizes, run = (replace(each, **changes) for each in (model.sizes, model.run))
    found = replace(model, shape=shape_of(sizes, name, seq_len), sizes=sizes, run=run, changes=changes)
    # Existing weights would belong to another layer.
    return replace(found, pretrained=None, has_weights=False) if "custom_layer" in changes else found


def _named_model(name: str, seq_len: int) -> PlannedModel:
    check_planned_model(name)
    try:
        shape = model_shape(name, seq_len)
    except ConfigError as error:
        raise ConfigError(f"--model {name}: {error}") from None
    path = Path(name)
    if not name.endswith(".json") and not os.path.isdir(path):
        return PlannedModel(preset_name(name) or name, shape, shape.nearest, preset(name))
    file = path / CONFIG_FILE if os.path.isdir(path) else path
    try:
        model = model_of(read_json_object(file, Source(str(file), ConfigError, "download it again")), str(file))
    except ConfigError as error:
        return PlannedModel(name, shape, shape.nearest, None, why_not=str(error))
    if file.name != CONFIG_FILE:  # only a shape: weights are read from a directory with a file of this name
        return PlannedModel(name, shape, model, model)
    return PlannedModel(name, shape, model, model, str(file.parent), has_weights(file.parent))
