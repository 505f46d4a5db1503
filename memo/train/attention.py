"""Chooses the attention kernels of a run: by measured times of like calls on this device, otherwise by a rule."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch

from memo import __version__
from memo.artifacts.attention_table import AttentionCase, AttentionRow, AttentionTable, length_class
from memo.artifacts.profile_cache import attention_table_file, read_attention_table
from memo.attention.delta_kernels import choose_delta
from memo.attention.select import AttentionChoice, choose_backend
from memo.config import RunConfig
from memo.config.attention_kernels import LARGEST_FUSED_HEAD_DIM, kernels_for
from memo.config.derived import resolved_a2a_size, ring_size
from memo.config.layer_words import LINEAR
from memo.errors import ArtifactError, warn
from memo.parallel.dtypes import torch_dtype
from memo.profiler.attention import time_attention
from memo.spec.stack import runs_of_kinds, stack_of
from memo.train.device import device_name


def choose_attention(config: RunConfig, device: torch.device) -> AttentionChoice:
    """The backend that --attention-backend means on this device; `config` has a resolved dtype.

    Each rank reads its own node's cache. If the table cannot be used, this warns, and the rule decides. Raises the
    errors of `choose_backend`.
    """
    wanted, table = config.hardware.attention_backend, None
    if device.type == "cuda" and wanted == "auto":
        table = _kept_table(config, device)
    is_capped, large = config.model.attn_logit_softcapping > 0, config.model.of_full_layers.head_dim
    calls = attention_calls(config)
    choice = choose_backend(wanted, device.type, config.model.head_dim, calls, table, capped=is_capped)
    if kernels_for(choice.name, large) != choice.name:
        choice = replace(choice, reason=f"{choice.reason}; heads of {large} channels by torch's operations")
    return choice


def choose_delta_nets(config: RunConfig, device: torch.device) -> AttentionChoice | None:
    """The kernels that --delta-backend means on this device; None if the model has no gated delta nets.

    `config` has a resolved dtype. Raises the errors of `choose_delta`.
    """
    if LINEAR not in config.model.types_of_layers:
        return None
    dtype = torch_dtype(str(config.training.params_dtype))
    return choose_delta(config.hardware.delta_backend, device.type, dtype, config.model.linear_key_head_dim)


def attention_calls(config: RunConfig, packed: bool | None = None) -> dict[AttentionCase, float]:
    """The number of calls of each case by one layer of a rank, averaged over all layers; layers whose heads are too
    large for fused kernels have none.

    A rank's tokens attend to each other causally. On a ring of P ranks they also attend to the tokens of the other
    ranks: half of P - 1 full squares of scores (memo.parallel.context). `packed`: whether a sample holds several
    documents; None: as --packing says.
    """
    stack, calls = stack_of(config.model), Counter[AttentionCase]()
    for run in runs_of_kinds(config):
        if run.model.head_dim > LARGEST_FUSED_HEAD_DIM:
            continue
        share = stack.count(run.model) / len(stack)
        calls.update({case: share * count for case, count in _calls_of_kind(run, packed).items()})
    return dict(calls)


def _calls_of_kind(config: RunConfig, packed: bool | None) -> dict[AttentionCase, float]:
    data, ring = config.data, ring_size(config.model, config.parallel)
    dtype, repeats = str(config.training.params_dtype), config.hardware.deterministic
    case = partial(AttentionCase, config.model.head_dim, dtype, deterministic=repeats)
    window = config.model.window(data.seq_length)
    if window is not None:  # two triangles of every strip (memo.spec.window)
        strips = case(causal=True, packed=False, tokens=length_class(window))
        return {strips: 2.0 * data.seq_length / ring / window}
    tokens = length_class(data.seq_length // ring)
    packed = data.packs_documents if packed is None else packed
    calls = {case(causal=True, packed=packed, tokens=tokens): 1.0}
    if ring > 1:
        calls[case(causal=False, packed=False, tokens=tokens)] = (ring - 1) / 2
    return calls


def measure_attention(config: RunConfig, device: torch.device) -> tuple[tuple[AttentionRow, ...], Path | None]:
    """Time this run's cases, packed and not, and keep the times; returns the rows and the file (None: not kept).

    Warns if the kept table cannot be read, and replaces it; warns if it cannot be written.
    """
    cases = {**attention_calls(config, packed=False), **attention_calls(config, packed=True)}
    shards = config.parallel.tp * resolved_a2a_size(config.model, config.parallel)
    heads, kv_heads = config.model.num_attention_heads // shards, max(1, config.model.kv_heads // shards)
    rows = time_attention(cases, heads, kv_heads, config.training.micro_batch_size, device)
    path = attention_table_file(config.memory.profile_cache, _empty_table(device))
    if path is not None:
        try:
            _kept_table(config, device).updated(rows).save(path)
        except ArtifactError as error:
            warn(f"times of attention kernels are not kept: {error}, or --profile-cache DIR")
            path = None
    return rows, path


def describe_rows(rows: Sequence[AttentionRow]) -> str:
    """Return a text for people with one line for each case and each backend."""
    lines = ["attention kernels, forward and backward:"]
    for row in rows:
        lines.append(f"  {row.case}, {row.heads} heads ({row.kv_heads} k/v), batch {row.batch}")
        lines += [
            f"    {name:<14}{seconds * 1e3:.3f} ms" for name, seconds in sorted(row.seconds.items(), key=itemgetter(1))
        ]
        lines += [f"    {name:<14}unusable: {reason}" for name, reason in row.unusable.items()]
    return "\n".join(lines)


def _kept_table(config: RunConfig, device: torch.device) -> AttentionTable:
    empty = _empty_table(device)
    path = attention_table_file(config.memory.profile_cache, empty)
    if path is None:
        return empty
    try:
        return read_attention_table(path, empty)
    except ArtifactError as error:
        warn(f"the kept times of attention kernels are not used: {error}")
        return empty


def _empty_table(device: torch.device) -> AttentionTable:
    return AttentionTable(device_name(device), torch.__version__, __version__)
