"""One run: every concern together, and its TOML form."""

import dataclasses
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from memo.artifacts.fields import NonNegativeFloat, PositiveFloat, checked, field_types
from memo.artifacts.reading import Source, shown
from memo.artifacts.reading import read_toml as read_document
from memo.config.data import DataConfig
from memo.config.flag import COUNT, Flag, NonNegativeInt, PathText, PositiveInt, ReadWith, reading_marks
from memo.config.flag_table import entries_of
from memo.config.memory import READ_WHERE_SOMETHING_MOVES, MemoryConfig
from memo.config.model import ModelConfig
from memo.config.other_names import advice
from memo.config.parallel import ParallelConfig
from memo.config.training import TrainingConfig
from memo.errors import ConfigError

RUN_CONFIG = "config.toml"
"""File of the run's configuration, beside its checkpoints."""

_SAVES = ReadWith("save", use="--save DIR")
_LOADS = ReadWith("load", use="--load DIR")


@dataclass(frozen=True)
class CheckpointConfig:
    """Where training state is kept."""

    save: PathText | None = None
    """Directory for checkpoints and the resolved configuration."""
    load: PathText | None = None
    """Directory of checkpoints to resume from, or one iter_... directory in it. If it is that of --save and nothing is
    saved there yet, the run starts afresh. Default: start afresh."""
    load_accept_changes: Annotated[str | None, _LOADS] = None
    """Fields of model and data, with commas between, that may differ from those of the run that --load continues, such
    as seq_length,rotary_base; any other difference is refused."""
    pretrained_checkpoint: PathText | None = None
    """Hugging Face directory whose weights are the initial ones; --model DIR sets it. Not read when resuming."""
    lora_checkpoint: Annotated[
        str | None, ReadWith("lora_rank", use="--lora-rank 16"), ReadWith("pretrained_checkpoint", use="--model DIR")
    ] = None
    """PEFT directory whose adapters are the initial ones. Not read when resuming. Default: new adapters, which change
    nothing at first."""
    save_interval: Annotated[NonNegativeInt, COUNT, _SAVES] = 0
    """Steps between two checkpoints; the run also saves at its end. 0: do not save by steps."""
    save_interval_minutes: Annotated[NonNegativeFloat | None, _SAVES] = None
    """Minutes between two checkpoints, by the clock of rank 0; 0: do not save by time. Default: 30 where --save is
    given and --save-interval is not."""
    async_save: Annotated[bool, _SAVES] = False
    """Write checkpoints in a thread while training goes on; the next update of the weights waits until this rank's
    share is written. Off by default, as it has not yet run on a GPU."""
    verify_checkpoint: Annotated[bool, _LOADS] = True
    """Verify the checksums of the checkpoint of --load; off: accept a damaged one."""
    keep_latest_k: Annotated[NonNegativeInt, _SAVES] = 0
    """Checkpoints that stay in --save; older ones are deleted once a newer one is complete. 0: keep all that
    --save-interval asks for, and the newest of those that --save-interval-minutes alone asks for."""


LogFormat = Literal["short", "megatron"]
KernelSet = Literal["torch", "triton"]


@dataclass(frozen=True)
class LoggingConfig:
    """What a run logs, and where."""

    log_interval: Annotated[PositiveInt, COUNT] = 1
    """Steps between two log lines; where activations are swapped, also between two steps whose copies are timed."""
    log_format: LogFormat = "short"
    """short: a line of 120 columns; megatron: Megatron-LM's line, with TGS and MFU added."""
    log_jsonl: str | None = None
    """File for one JSON object per iteration, at full precision; `memo report` draws it. Default: log.jsonl in
    --save."""
    tensorboard_dir: str | None = None
    """Directory for TensorBoard event files (needs the package tensorboard)."""
    wandb_project: str | None = None
    """Weights & Biases project (needs the package wandb)."""
    heartbeat_file: str | None = None
    """File that rank 0 replaces within a second of each step: iteration, time (seconds since 1970), pid and host, as
    JSON. A launcher that watches its age can tell that a run hangs."""
    progress: bool = True
    """Progress bar on rank 0 when standard error is a terminal."""


@dataclass(frozen=True)
class HardwareConfig:
    """The device, its kernels and its CPU threads."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a GPU, else cpu."""
    attention_backend: Literal[
        "auto", "cpu", "cudnn", "flash", "flash_attn", "flash_attn_3", "flash_attn_4", "te", "torch"
    ] = "auto"
    """Kernels of exact attention. auto: the fastest that `memo profile --attention` measured on this device for calls
    like this run's; without measurements cudnn from compute capability 9.0 on, and flash below; where scores are capped
    flash_attn if it is installed, else torch. torch: torch's operations, which run everywhere and are slow."""
    delta_backend: Literal["auto", "torch", "fla"] = "auto"
    """Kernels of gated delta nets. auto: flash-linear-attention's (fla) on CUDA where it is installed and can run, else
    torch's operations. Estimates take auto for torch's operations."""
    deterministic: Annotated[bool, Flag(aliases=("deterministic_mode",))] = False
    """Make every run of the same flags on the same machines give the same bits: kernels, products and messages add in a
    fixed order. Leaves cuDNN's attention out, so that attention takes about twice as long on GPUs from compute
    capability 9.0 on, as `memo estimate` foresees."""
    kernels: KernelSet = "torch"
    """Norms, RoPE, activations, loss: PyTorch's, or fused ones in Triton (CUDA only, not yet timed on a GPU)."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one device, for MFU, which is shown on GPUs alone and never above 100 %. Default: from a table by
    the whole name of the device, else measured."""
    num_threads: PositiveInt | None = None
    """CPU threads of one rank. Default: the CPUs that the ranks of the node may use, or their quota, divided by the
    number of ranks; 1 for a tiny model on CPUs. OMP_NUM_THREADS, which torchrun sets to 1, is ignored."""
    numa_binding: Literal["auto", "off"] = "auto"
    """auto: run each rank on the NUMA node of its GPU, and so keep its host memory there; a rank that torchrun's
    --numa-binding or Slurm has bound stays as it is."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run; saved beside its results as config.toml."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def override(self, values: dict[str, Any], source: str = "overrides") -> "RunConfig":
        """A copy with flat field names replaced, such as `{"seq_length": 4096, "lr": 1e-4}`.

        Raises ConfigError for a name that no section has, with the nearest one, for a field that is
        given twice under two names, and for a value of the wrong type.
        """
        chosen: dict[str, Any] = {}
        for given, value in values.items():
            section, name = section_of(given, source), canonical_name(given)
            if name in chosen:
                raise ConfigError(f"{source}: {name} is given twice ({shown(chosen[name])}, {shown(value)}): keep one")
            chosen[name] = _checked(type(getattr(self, section)), name, value, source)
        return self.replaced(chosen)

    def replaced(self, values: dict[str, Any]) -> "RunConfig":
        """A copy with fields replaced, by their full names, whose values are of the right type. What nothing reads any
        longer then has its default."""
        by_section: dict[str, dict[str, Any]] = {}
        values = _with_replaced(values)
        for name, value in {**_put_out_of_use(self, values), **values}.items():
            by_section.setdefault(section_of(name, ""), {})[name] = value
        sections = {name: dataclasses.replace(getattr(self, name), **given) for name, given in by_section.items()}
        after = dataclasses.replace(self, **sections)
        if not self.moves or after.moves:
            return after
        unread = {name: getattr(MemoryConfig, name) for name in READ_WHERE_SOMETHING_MOVES if name not in values}
        return dataclasses.replace(after, memory=dataclasses.replace(after.memory, **unread))

    @property
    def moves(self) -> bool:
        """Whether activations or states may move, to host memory or between ranks."""
        return self.memory.swaps or self.memory.offloads_states or self.parallel.shards_gradients

    def to_toml(self) -> str:
        """Sections as tables; fields that are None are left out (TOML has no null)."""
        lines = []
        for section in dataclasses.fields(self):
            lines.append(f"[{section.name}]")
            for key, value in dataclasses.asdict(getattr(self, section.name)).items():
                if value is not None:
                    lines.append(f"{key} = {toml_value(value)}")
            lines.append("")
        return "\n".join(lines)


def _put_out_of_use(run: RunConfig, given: dict[str, Any]) -> dict[str, Any]:
    """{field: default} of what nothing reads any longer once `given` replaces fields, such as the factor of a preset's
    scaling under --rope-scaling-type none, or the tiles of a run's file under --offload-alpha off."""
    found = {
        name: default
        for name, default, mark in _readers()
        if name not in given
        and mark.field in given
        and mark.accepts(getattr(getattr(run, section_of(mark.field, "")), mark.field))
        and not mark.accepts(given[mark.field])
    }
    return {**found, **_put_out_of_use(run, {**given, **found})} if found else {}


@cache
def _readers() -> tuple[tuple[str, Any, ReadWith], ...]:
    """(field, its default, the mark of the field with which alone it is read), of all sections."""
    return tuple(
        (entry.name, entry.default, mark)
        for kind in _sections().values()
        for entry in dataclasses.fields(kind)
        for mark in reading_marks(kind)[entry.name]
    )


def _checked(section: type, name: str, value: object, source: str) -> object:
    """`value`, which no parser has seen, as the field `name` of a section stores it.

    Where the field counts something, "512K" becomes a number; where a float is due, a whole number becomes one. A list
    of texts may be one text without brackets, and may hold numbers without quotes. Raises ConfigError that names the
    source, the field, the value and what would be accepted.
    """
    entry = next(entry for entry in entries_of(section) if entry.field == name)
    if isinstance(value, str) and entry.unit is not None:
        return entry.read(value, f"{source}: {name}")
    if entry.is_list and entry.hint is str and value is not None:
        words = value if isinstance(value, list | tuple) else (value,)
        value = tuple(repr(each) if type(each) in (int, float) else each for each in words)
    return checked(field_types(section)[name], value, name, Source(source, ConfigError, ""))


def _sections() -> dict[str, type]:
    """{name: dataclass} of the sections of a run."""
    return {section.name: section.default_factory for section in dataclasses.fields(RunConfig)}  # type: ignore[misc]


SHORT_NAMES = {
    alias: entry.field for kind in _sections().values() for entry in entries_of(kind) for alias in entry.mark.aliases
}
"""{short or earlier name of a flag: field}; also accepted as Python keywords and TOML keys."""


_REPLACED_BY = {
    "train_iters": ("num_epochs",),
    "num_epochs": ("train_iters",),
    "data_path": ("mock_data",),
    "mock_data": ("data_path", "eval_data_path", "num_epochs"),
    "eval_data_path": ("split",),
    "split": ("eval_data_path",),
}
"""{field: fields that say the same otherwise, or nothing beside it}."""


def _with_replaced(values: dict[str, Any]) -> dict[str, Any]:
    """`values`, with the defaults of the fields that they replace without giving them: the length or the data that a
    file gives in another way."""
    names = {name for given, value in values.items() if value for name in _REPLACED_BY.get(given, ())}
    sections = _sections()
    return {**{name: getattr(sections[section_of(name, "")], name) for name in names}, **values}


def canonical_name(name: str) -> str:
    name = name.replace("-", "_")
    return SHORT_NAMES.get(name, name)


@cache
def _field_sections() -> dict[str, str]:
    return {entry.field: name for name, kind in _sections().items() for entry in entries_of(kind)}


def section_of(name: str, source: str) -> str:
    """The section that holds a field; raises ConfigError with the nearest name."""
    sections = _field_sections()
    canonical = canonical_name(name)
    if canonical in sections:
        return sections[canonical]
    near = difflib.get_close_matches(canonical, [*sections, *SHORT_NAMES], n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else "see `memo train --help` for the names"
    hint = advice(canonical, {*sections, *SHORT_NAMES, "model"}, str) or hint
    raise ConfigError(f"{source}: there is no field {shown(name)}: {hint}")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Field values of a run.toml by full name: top-level keys and keys inside section tables alike.

    A top-level `model = "gpt-7b"` names a preset and is returned under the key "model". Types are
    checked by `RunConfig.override`. Raises ConfigError for a file that cannot be read, an unknown
    section or field, a field in the wrong section and a field given twice.
    """
    source = f"--config {path}"
    values: dict[str, Any] = {}
    document = read_document(path, Source(source, ConfigError, "give the path of a TOML file"))
    for section, name, value in _toml_entries(document, source):
        found = section_of(name, source) if (section, name) != ("", "model") else ""
        if section not in ("", found):
            raise ConfigError(f"{source}: {name} stands in [{section}] but belongs in [{found}]: move it there")
        key = canonical_name(name)
        if key in values:
            raise ConfigError(f"{source}: {key} is given twice ({shown(values[key])}, {shown(value)}): keep one")
        values[key] = value
    return values


def _toml_entries(document: dict[str, Any], source: str) -> Iterator[tuple[str, str, Any]]:
    """(section, name, value); the section of a top-level key is ''."""
    known = [section.name for section in dataclasses.fields(RunConfig)]
    for key, value in document.items():
        if not isinstance(value, dict):
            yield "", key, value
        elif key in known:
            yield from ((key, name, inner) for name, inner in value.items())
        else:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean [{near[0]}]?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{source}: there is no section [{shown(key)[1:-1]}]: {hint}")


def toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's; TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)
