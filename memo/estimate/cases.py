"""One question to the estimators (method, model, layout and machine), read from text cells and checked.

Cells come from a CSV file or from flags. A cell that is absent or empty takes its default. Every refusal is one
ConfigError that names the place of the cell, its column, its value and what would be accepted.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from memo.artifacts.reading import shown
from memo.config import PRESETS, ModelConfig
from memo.config.derived import BYTE_VOCAB_SIZE
from memo.config.flag import LARGEST
from memo.config.model import Quantization
from memo.config.model_name import model_problem
from memo.config.presets import preset_name
from memo.config.training import MomentDtype
from memo.errors import ConfigError
from memo.estimate.disks import with_disks
from memo.estimate.hardware import Hardware
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.hf_config import read_hf_config
from memo.estimate.machines import find_hardware
from memo.estimate.node_share import part_of_node, share_text
from memo.spec.shapes import ModelShape, shape_of

COUNTED = ("memo", "megatron-lm")
"""Programs whose runs are counted and timed."""
METHODS = (*COUNTED, "eq18", "llmem", "dnnmem", "paper-alpha")
RECOMPUTE = ("none", "selective", "full")
_COUNT = re.compile("[0-9]{1,15}")


@dataclass(frozen=True)
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
        lora_rank, lora_target_modules, quantize, freeze, train_only: what is trained, as in ModelConfig.
    """

    method: str
    model: str
    seq_len: int
    tp: int
    cp: int
    pp: int
    mbs: int
    gpus: int
    gpu_memory_gib: float
    global_batch_size: int | None
    hardware: Hardware
    alpha: float | Literal["auto"] | None
    vpp: int
    recompute: str
    loss_chunk_size: int
    host_memory_gib: float
    nvme_gib: float
    nvme_gb_per_s: float
    exp_avg_dtype: MomentDtype
    exp_avg_sq_dtype: MomentDtype
    deterministic: bool
    lora_rank: int
    lora_target_modules: str
    quantize: Quantization
    freeze: str
    train_only: str
    shape: ModelShape
    node_share: str

    @property
    def model_ranks(self) -> int:
        return self.tp * self.cp * self.pp


COLUMNS = tuple(field.name for field in fields(Case) if field.name not in ("shape", "node_share"))
"""Columns that are read; all others are passed through."""

DEFAULT_SEQ_LEN = 8192
MEMO_LOSS_CHUNK = 1024
"""The default of the trainer, and of estimates for memo's own runs and for runs with a swap plan."""


def read_case(cells: Mapping[str, str | None], where: str) -> Case:
    """The question that `cells` ask. Raises ConfigError, prefixed by `where`, for a missing model and for any cell that
    cannot be used."""
    read = _Reader({name: (cells.get(name) or "").strip() for name in COLUMNS}, where)
    seq_len = read.count("seq_len", DEFAULT_SEQ_LEN)
    tp, cp, pp = (read.count(name, 1) for name in ("tp", "cp", "pp"))
    gpus = read.count("gpus", tp * cp * pp)
    if gpus % (tp * cp * pp):
        raise read.refusal(
            "gpus", f"does not divide by tp {tp} x cp {cp} x pp {pp} = {tp * cp * pp}: give a multiple, or smaller ones"
        )
    memory_gib = read.size("gpu_memory_gib")
    hardware = read.using("hardware", lambda name: HARDWARE[name] if name == "cpu" else find_hardware(name, memory_gib))
    host_memory_gib = read.size("host_memory_gib")
    nvme_gib, nvme_gb_per_s = read.size("nvme_gib"), read.size("nvme_gb_per_s")
    share = share_text(hardware, gpus, host_memory_gib)
    part = part_of_node(hardware, gpus, host_memory_gib)
    hardware = read.using("nvme_gb_per_s", lambda _: with_disks(part, nvme_gib, nvme_gb_per_s))
    alpha = read.alpha()
    method, recompute = read.choice("method", METHODS), read.choice("recompute", RECOMPUTE)
    if alpha is not None and recompute != "none":
        raise read.refusal(
            "recompute", f"conflicts with alpha {alpha}, which decides what is recomputed: empty one of both"
        )
    trained: dict[str, Any] = {
        "lora_rank": 0 if read.text["lora_rank"] == "0" else read.count("lora_rank", 0),
        "lora_target_modules": read.text["lora_target_modules"] or ModelConfig.lora_target_modules,
        "quantize": read.choice("quantize", get_args(Quantization)),
        **{name: read.text[name] for name in ("freeze", "train_only")},
    }
    return Case(
        method=method,
        model=read.text["model"],
        seq_len=seq_len,
        tp=tp,
        cp=cp,
        pp=pp,
        mbs=read.count("mbs", 1),
        gpus=gpus,
        gpu_memory_gib=memory_gib or hardware.memory_gib,
        global_batch_size=read.count("global_batch_size", 0) or None,
        hardware=hardware,
        alpha=alpha,
        vpp=read.count("vpp", 1),
        recompute=recompute,
        loss_chunk_size=read.loss_chunk(0 if method == "megatron-lm" and alpha is None else MEMO_LOSS_CHUNK),
        host_memory_gib=hardware.host_memory_gib,
        nvme_gib=hardware.nvme_gib,
        nvme_gb_per_s=hardware.nvme_gb_per_s,
        exp_avg_dtype=read.choice("exp_avg_dtype", get_args(MomentDtype)),
        exp_avg_sq_dtype=read.choice("exp_avg_sq_dtype", get_args(MomentDtype)),
        deterministic=read.choice("deterministic", ("false", "true")) == "true",
        **trained,
        shape=read.using("model", lambda name: _trained_shape(model_shape(name, seq_len), trained, seq_len)),
        node_share=share,
    )


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


@dataclass(frozen=True)
class _Reader:
    """Reads the cells of one row by type. All methods raise ConfigError for a cell that cannot be used."""

    text: dict[str, str]
    where: str

    def refusal(self, column: str, why: str) -> ConfigError:
        return ConfigError(f"{self.where}: {column} is {shown(self.text[column])}: {why}")

    def count(self, column: str, default: int) -> int:
        text = self.text[column]
        if not text:
            return default
        if not _COUNT.fullmatch(text) or not 1 <= int(text) <= LARGEST:
            raise self.refusal(column, "give a whole number above 0, such as 8, or leave it empty")
        return int(text)

    def loss_chunk(self, default: int) -> int:
        return 0 if self.text["loss_chunk_size"] == "0" else self.count("loss_chunk_size", default)

    def size(self, column: str) -> float | None:
        """GiB above 0; None if the cell is empty."""
        value = self._number(column, "give GiB above 0, such as 80, or leave it empty")
        if value is not None and not 0 < value <= LARGEST:
            raise self.refusal(column, "give GiB above 0, such as 80, or leave it empty")
        return value

    def alpha(self) -> float | Literal["auto"] | None:
        """None if the cell is off or empty."""
        if self.text["alpha"] == "off":
            return None
        if self.text["alpha"] == "auto":
            return "auto"
        remedy = "it is a share: give 0 to 1, auto, or off (nothing moves)"
        value = self._number("alpha", remedy)
        if value is not None and not 0 <= value <= 1:
            raise self.refusal("alpha", remedy)
        return value

    def choice(self, column: str, choices: tuple[Any, ...]) -> Any:
        text = self.text[column] or choices[0]
        if text not in choices:
            raise self.refusal(column, f"use one of {', '.join(choices)}")
        return text

    def using(self, column: str, function: Callable[[str], Any]) -> Any:
        """function(cell); to its ConfigError the place of the cell and its column are added."""
        try:
            return function(self.text[column])
        except ConfigError as error:
            raise self.refusal(column, str(error)) from None

    def _number(self, column: str, remedy: str) -> float | None:
        if not self.text[column]:
            return None
        try:
            return float(self.text[column])
        except ValueError:
            raise self.refusal(column, remedy) from None
