"""One question to the estimators (method, model, layout and machine), read from text cells and checked.

Cells come from a CSV file or from flags. A cell that is absent or empty takes its default. Every refusal is one
ConfigError that names the place of the cell, its column, its value and what would be accepted.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from memo.artifacts.fields import checked, field_types
from memo.artifacts.reading import Source, shown
from memo.config import PRESETS, ModelConfig
from memo.config.derived import BYTE_VOCAB_SIZE
from memo.config.flag import COUNT, TOKENS, NonNegativeInt, PositiveInt, SizeGib
from memo.config.flag_table import Entry, entries_of
from memo.config.memory import OffloadAlpha, RecomputeGranularity
from memo.config.model import CHOICES_OF_TRAINED, Quantization
from memo.config.model_name import model_problem
from memo.config.presets import preset_name
from memo.config.run import HardwareConfig, KernelSet
from memo.config.training import MomentDtype
from memo.errors import ConfigError
from memo.estimate.disks import with_disks
from memo.estimate.hardware import Hardware
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.hf_config import read_hf_config
from memo.estimate.machines import find_hardware
from memo.estimate.node_share import part_of_node, share_text
from memo.spec.shapes import ModelShape, shape_of

Found = TypeVar("Found")
COUNTED = ("memo", "megatron-lm")
"""Programs whose runs are counted and timed."""
Method = Literal["memo", "megatron-lm", "eq18", "llmem", "dnnmem", "paper-alpha"]

DEFAULT_SEQ_LEN = 8192
MEMO_LOSS_CHUNK = 1024
"""The default of the trainer, and of estimates for memo's own runs and for runs with a swap plan."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checked question; fields are the columns of the same names, and the shape of the model.

    Attributes:
        global_batch_size: None for enough microbatches to fill the pipeline.
        hardware: the machine, with the part of a node that the GPUs get, and the disks of `nvme_gib`.
        gpu_memory_gib: memory of one GPU, as its driver reports it.
        host_memory_gib: host memory that the run gets of each node.
        node_share: a text about the assumed part of a node; empty if the run gets whole nodes.
        nvme_gib, nvme_gb_per_s: a node's local disks for activations that do not fit in its memory, and their rate in
            either direction; 0: there are none.
        alpha: share of the tokens that moves to the host; auto: as limits and times allow; None: nothing moves.
        method: memo and megatron-lm name the program whose runs are asked about; all others are a paper's formulas.
        loss_chunk_size: tokens whose logits exist at once; 0 for all of them, which is the default of megatron-lm.
        exp_avg_dtype, exp_avg_sq_dtype: dtypes of AdamW's moments between steps.
        deterministic: whether every run gives the same bits.
        kernels: as in HardwareConfig.
        lora_rank, lora_target_modules, quantize, freeze, train_only: what is trained, as in ModelConfig.
    """

    method: Method = "memo"
    model: str
    seq_len: Annotated[PositiveInt, TOKENS] = DEFAULT_SEQ_LEN
    tp: PositiveInt = 1
    cp: PositiveInt = 1
    pp: PositiveInt = 1
    mbs: PositiveInt = 1
    gpus: PositiveInt
    gpu_memory_gib: SizeGib
    global_batch_size: Annotated[PositiveInt | None, COUNT] = None
    hardware: Hardware
    alpha: OffloadAlpha | None = None
    vpp: PositiveInt = 1
    recompute: RecomputeGranularity = "none"
    loss_chunk_size: Annotated[NonNegativeInt, TOKENS]
    host_memory_gib: SizeGib
    nvme_gib: SizeGib
    nvme_gb_per_s: SizeGib
    exp_avg_dtype: MomentDtype = "fp32"
    exp_avg_sq_dtype: MomentDtype = "fp32"
    deterministic: bool = False
    kernels: KernelSet = HardwareConfig.kernels
    lora_rank: NonNegativeInt = ModelConfig.lora_rank
    lora_target_modules: str = ModelConfig.lora_target_modules
    quantize: Quantization = ModelConfig.quantize
    freeze: str = ""
    train_only: str = ""
    shape: ModelShape
    node_share: str

    @property
    def model_ranks(self) -> int:
        return self.tp * self.cp * self.pp


COLUMNS = tuple(field.name for field in fields(Case) if field.name not in ("shape", "node_share"))
"""Columns that are read; all others are passed through."""
_TYPED = tuple(entry for entry in entries_of(Case) if entry.field in {*COLUMNS} - {"hardware"})


def read_case(cells: Mapping[str, str | None], where: str) -> Case:
    """The question that `cells` ask. Raises ConfigError, prefixed by `where`, for a missing model and for any cell that
    cannot be used."""
    text = {name: (cells.get(name) or "").strip() for name in COLUMNS}
    given = {entry.field: _value(entry, text[entry.field], where) for entry in _TYPED if text[entry.field]}

    def refusal(column: str, why: str) -> ConfigError:
        return ConfigError(f"{where}: {column} is {shown(text[column])}: {why}")

    def using(column: str, function: Callable[[], Found]) -> Found:
        try:
            return function()
        except ConfigError as error:
            raise refusal(column, str(error)) from None

    tp, cp, pp = (given.get(name, 1) for name in ("tp", "cp", "pp"))
    gpus, seq_len = given.get("gpus", tp * cp * pp), given.get("seq_len", DEFAULT_SEQ_LEN)
    if gpus % (tp * cp * pp):
        raise refusal(
            "gpus", f"does not divide by tp {tp} x cp {cp} x pp {pp} = {tp * cp * pp}: give a multiple, or smaller ones"
        )
    alpha, memory_gib, host_memory_gib = (given.get(name) for name in ("alpha", "gpu_memory_gib", "host_memory_gib"))
    alpha = None if alpha == "off" else alpha
    if alpha is not None and given.get("recompute", "none") != "none":
        raise refusal("recompute", f"conflicts with alpha {alpha}, which decides what is recomputed: empty one of both")
    name = text["hardware"]
    whole = using("hardware", lambda: HARDWARE[name] if name == "cpu" else find_hardware(name, memory_gib))
    part, disks = part_of_node(whole, gpus, host_memory_gib), (given.get("nvme_gib"), given.get("nvme_gb_per_s"))
    hardware = using("nvme_gb_per_s", lambda: with_disks(part, *disks))
    trained = {name: given[name] for name in CHOICES_OF_TRAINED if name in given}
    all_at_once = given.get("method") == "megatron-lm" and alpha is None
    resolved = {
        "model": text["model"],
        "alpha": alpha,
        "gpus": gpus,
        "gpu_memory_gib": memory_gib or hardware.memory_gib,
        "loss_chunk_size": given.get("loss_chunk_size", 0 if all_at_once else MEMO_LOSS_CHUNK),
        **{name: getattr(hardware, name) for name in ("host_memory_gib", "nvme_gib", "nvme_gb_per_s")},
        "hardware": hardware,
        "shape": using("model", lambda: _trained_shape(model_shape(text["model"], seq_len), trained, seq_len)),
        "node_share": share_text(whole, gpus, host_memory_gib),
    }
    return Case(**(given | resolved))


def _value(entry: Entry, text: str, where: str) -> Any:
    """The value of a cell that is not empty."""
    if entry.is_switch and text in ("false", "true"):
        return text == "true"
    value = entry.read(text, f"{where}: {entry.field}")
    return checked(field_types(Case)[entry.field], value, entry.field, Source(where, ConfigError, "leave it empty"))


def _trained_shape(shape: ModelShape, trained: Mapping[str, Any], seq_len: int) -> ModelShape:
    """The shape with the choices of what is trained. Raises ConfigError for a model that memo can only plan for."""
    model = replace(shape.nearest, **trained)
    if model == shape.nearest:
        return shape
    if shape.parameters != shape_of(shape.nearest, shape.name, seq_len).parameters:
        raise ConfigError("memo trains no such model, so nothing of it can be frozen: leave lora_rank and freeze empty")
    return shape_of(model, shape.name, seq_len)


@lru_cache(maxsize=256)
def model_shape(name: str, seq_len: int) -> ModelShape:
    """The shape of a preset, or of a config.json of Hugging Face (a file or its directory). Raises ConfigError.

    Cached, because thousands of cases ask for few models.
    """
    if not name:
        raise ConfigError(f"no model is named: give a preset ({', '.join(PRESETS)}) or the path of a config.json")
    if name.endswith(".json") or os.path.isdir(name):  # also False for a name that no file can have
        return read_hf_config(name)
    known = preset_name(name)
    if known is None:
        raise ConfigError(model_problem(name, config_is_enough=True))
    model = PRESETS[known]
    return shape_of(replace(model, vocab_size=model.vocab_size or BYTE_VOCAB_SIZE), name, seq_len)
