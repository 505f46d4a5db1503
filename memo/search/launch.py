"""Turn a choice into a run: a configuration file for `memo train --config`, and the command that starts it."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from memo.artifacts.regular_file import replace_file
from memo.config import RunConfig
from memo.config.check_fields import written
from memo.config.checks import check
from memo.config.derived import default_lr
from memo.config.launching import torchrun_nodes
from memo.config.model_name import choose_model
from memo.config.presets import PRESETS
from memo.config.run import SHORT_NAMES, HardwareConfig
from memo.errors import ConfigError, writing
from memo.estimate.host_memory import HOST_FITS_SHARE
from memo.estimate.verdict import Verdict
from memo.search.candidates import config_of
from memo.search.plan import Choice
from memo.search.question import Question
from memo.spec.disk import DISK_FITS_SHARE
from memo.units import GIB

STEP_MINUTES_MARGIN = 4
"""A run admits steps of up to this many times the predicted time: its own check is rougher than the search."""


def run_of(question: Question, choice: Choice, data_path: Sequence[str] | None = None) -> RunConfig:
    """Return the checked run of a choice; its host memory is bounded if the question bounds it.

    Raises ConfigError for a model that memo can only plan for.
    """
    model = question.model
    if model.run is None:
        raise ConfigError(f"--model {model.name} cannot be trained, only planned for: {model.why_not}")
    config = config_of(question, choice.layout, choice.strategy)
    memory, training = config.memory, config.training
    moves_states = choice.strategy.placement is not None and choice.strategy.placement.optimizer > 0
    if (choice.strategy.swaps or moves_states) and question.host_is_given:
        memory = replace(memory, offload_host_memory_gib=HOST_FITS_SHARE * question.host_memory_gib)
    needs_disk = choice.sized.disk_bytes > 0
    disk_gib = DISK_FITS_SHARE * question.hardware.nvme_gib if needs_disk else None
    path = question.nvme_path if needs_disk else None
    memory = replace(memory, offload_nvme_path=path, offload_nvme_gib=disk_gib)
    minutes = math.ceil(STEP_MINUTES_MARGIN * choice.step.step_time_s / 60)
    config = replace(
        config,
        model=model.run,
        memory=memory,
        training=replace(training, max_step_minutes=max(training.max_step_minutes, float(minutes))),
        data=replace(config.data, data_path=None if data_path is None else tuple(data_path)),
        checkpoint=replace(config.checkpoint, pretrained_checkpoint=model.pretrained),
        hardware=replace(config.hardware, attention_backend="auto"),  # the run may know the fastest one by measurement
    )
    check(config, question.gpus, needs_data=False)
    return config


def write_run(question: Question, choice: Choice, path: str, data_path: Sequence[str] | None = None) -> None:
    """Write the run as TOML, with the predicted speed and memory in comments. Raises ConfigError."""
    step, sized, run = choice.step, choice.sized, run_of(question, choice, data_path)
    lines = [
        f"# Planned by memo for {question.gpus} GPUs ({question.hardware.name}, {question.gpu_memory_gib:.4g} GiB).",
        f"# Expected: {step.tgs:,.0f} tokens per GPU and second, MFU {step.mfu_percent:.1f} %, "
        f"{step.step_time_s:,.1f} s a step,",
        f"# {sized.memory.total / GIB:,.1f} GiB of a GPU, {sized.host_bytes / GIB:,.1f} GiB of a node's host memory.",
        *([f"# {sized.disk_bytes / GIB:,.1f} GiB of a node's disks."] if sized.disk_bytes else []),
        *(["# Tight: with a GiB more of what torch does not see it would not fit."] if sized.is_tight else []),
        *([] if sized.verdict == Verdict.FITS else [f"# It may not fit: {sized.shortage(question)}."]),
        f"# Unless given: {default_lr(run)}.",
        "",
        run.to_toml(),
    ]
    with writing(f"--out {path}", ConfigError):
        replace_file(path, "\n".join(lines))


def trial_file(path: str) -> str:
    """Return the file of the run to try first, given that of the best run: run.first.toml beside run.toml."""
    file = Path(path)
    return str(file.with_name(f"{file.stem}.first{file.suffix}"))


def command(
    question: Question, choice: Choice, config_file: str | None = None, data_path: Sequence[str] | None = None
) -> str:
    """Return the torchrun line for the first start and every later one; it is to be run on each node.

    Without `config_file`, which `write_run` has written, the line has every flag of the run.
    """
    machine = question.hardware
    nodes = -(-question.gpus // machine.gpus_per_node)
    data = "" if config_file is not None and data_path else f" --data-path {shlex.join(data_path or ['DATA'])}"
    flags = [f"--config {shlex.quote(config_file)}"] if config_file is not None else _flags(question, choice)
    launcher = torchrun_nodes(nodes, min(question.gpus, machine.gpus_per_node))
    return f"{launcher} -m memo train {' '.join(flags)}{data} --save RUN --load RUN"


_SHORT = {SHORT_NAMES[short]: short for short in ("tp", "cp", "pp", "vpp", "mbs", "gbs")}


def _flags(question: Question, choice: Choice) -> list[str]:
    """Return the flags of all fields in which the run differs from the defaults, --model first."""
    run = run_of(question, choice)
    base, flags = RunConfig(hardware=HardwareConfig(device=run.hardware.device)), []
    name = question.model.pretrained or question.model.name
    if question.model.pretrained or name in PRESETS:
        base, flags = choose_model(base, name), [f"--model {shlex.quote(name)}"]
    for section in fields(run):
        ours, theirs = getattr(run, section.name), getattr(base, section.name)
        for field in fields(ours):
            value = getattr(ours, field.name)
            if value != getattr(theirs, field.name):
                quoted = shlex.quote(value) if isinstance(value, str) else value
                flags.append(written(_SHORT.get(field.name, field.name), quoted))
    return flags
