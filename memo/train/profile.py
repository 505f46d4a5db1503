"""`memo profile` on the ranks of a run: it measures one layer alone, and makes the swap plan from the profile."""

import contextlib
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from memo.artifacts.layer_profile import LayerProfile
from memo.config import RunConfig
from memo.errors import AllocatorError, ConfigError, is_first_of_node
from memo.estimate.state_memory import state_bytes
from memo.executor.host_budget import settle
from memo.mesh import Mesh, init_distributed, local_device, refusals_are_heard
from memo.model.custom import make_layer
from memo.model.parts import ModelParts
from memo.parallel.collectives import all_reduce
from memo.parallel.data import ShardedDataParallel
from memo.parallel.dtypes import torch_dtype
from memo.planner.profile_table import describe_profile
from memo.spec.layer_ops import stage_ops
from memo.spec.schedule import pipeline_of
from memo.train.attention import choose_attention, describe_rows, measure_attention
from memo.train.build import attention_of_layers, build, build_mesh, delta_net_of
from memo.train.ending import shutdown
from memo.train.layer_profile import keep, measure, one_of_each_kind
from memo.train.memory_choice import agreed
from memo.train.outputs import check_writable
from memo.train.planned_memory import batches_to_record
from memo.train.setup import Prepared, prepare
from memo.train.swap import decide, free_device_bytes
from memo.train.watchdog import Watchdog
from memo_kernels import select_ops


def profile_run(
    config: RunConfig,
    out: str | None,
    trace_out: str | None = None,
    *,
    is_managed: bool = False,
    oversubscribes: bool = False,
    attention: bool = False,
) -> None:
    """Measure one layer on every rank of the run that `config` describes; rank 0 writes and prints. The other arguments
    are the options of `memo profile` (memo.cli.profile).

    Raises the errors of training for a run that cannot start, PlanError and HostMemoryError if there is no plan,
    AllocatorError if requests cannot be recorded, and ConfigError for managed memory without CUDA.
    """
    check_writable("--out", out, is_directory=False)
    check_writable("--trace-out", trace_out, is_directory=False)
    if trace_out is None and config.memory.memory_planner is None:  # no step runs that could be planned
        config = config.override({"memory_planner": "off"})
    # Managed memory counts and refuses requests one by one, so no estimate needs to refuse the run before.
    with refusals_are_heard(config.parallel):
        prepared = prepare(config, must_fit=not is_managed)
    wanted, config, device = config.hardware.attention_backend, prepared.config, local_device(prepared.device_type)
    if is_managed and device.type != "cuda":
        raise ConfigError(
            f"--managed-memory is memory of CUDA, but the run is on --device {device.type}: leave it out, which "
            "records the same requests here"
        )
    world = init_distributed(device, config.parallel)
    watchdog = Watchdog(config, world)
    try:
        with watchdog.reporting_errors(has_started=False):
            mesh = build_mesh(config, world.rank, world.size, watchdog.watch)
            config = agreed(config, mesh, device)
            prepared = replace(prepared, config=config)
            if attention:
                config = _with_measured_attention(config, wanted, mesh, device)
            _profile(config, mesh, device, out)
            if trace_out is not None:
                _record(prepared, mesh, device, trace_out, is_managed, oversubscribes)
    finally:
        shutdown()
        watchdog.close()


def _with_measured_attention(config: RunConfig, wanted: str, mesh: Mesh, device: torch.device) -> RunConfig:
    """Measure kernels on one device of each node; returns `config` with the backend that `wanted` then selects."""
    if is_first_of_node():
        rows, path = measure_attention(config, device)
        _show(mesh, f"{describe_rows(rows)}\nkept in {path}")
    all_reduce(torch.zeros(1, device=device), mesh.world)  # the other ranks wait, as their work would disturb the times
    choice = choose_attention(config.override({"attention_backend": wanted}), device)
    _show(mesh, f"attention: {choice.name} ({choice.reason})\n")
    return config.override({"attention_backend": choice.name})


def _profile(config: RunConfig, mesh: Mesh, device: torch.device, out: str | None) -> None:
    # A run without a swap plan has no tiles, but its layer can be measured on tiles all the same.
    on_tiles = {} if config.memory.swaps else {"offload_alpha": "auto", "recompute_granularity": "none"}
    host = settle(config, mesh, device)
    profile = _measure_alone(config.override(on_tiles), mesh, device)
    _show(mesh, describe_profile(profile))
    origin = keep(profile, config.memory.profile_cache, mesh)
    if out is not None:
        if mesh.is_main_rank:
            profile.save(out)
        origin += f" and written to {out}"
    if not config.memory.swaps:
        _show(mesh, f"\nprofile {origin}\nno plan: --offload-alpha off, or --recompute-granularity in its place")
        return
    free_bytes = free_device_bytes(config, mesh, device, host)
    host.draw("states", state_bytes(config, mesh.grid.world_size, mesh.at.pp).host)  # as the model would, if it existed
    ops = stage_ops(pipeline_of(config, mesh.grid.world_size), mesh.at.pp, config.model.num_layers)
    chosen = decide(config, mesh, ops, profile, origin, free_bytes, host, device)
    _show(mesh, f"\nplan for {chosen.describe()}")


def _record(
    prepared: Prepared, mesh: Mesh, device: torch.device, out: str, is_managed: bool, oversubscribes: bool
) -> None:
    """Record the memory requests that training records before its first step, but do not reserve planned memory."""
    config = prepared.config.override({"memory_planner": "auto"})
    parts = build(config, mesh, prepared.dtype, device)
    transients = parts.transients
    assert transients is not None
    batches = parts.feed(prepared.train_data).next_global_batch()
    recorded = batches_to_record(config, batches, transients.on_cuda)
    with contextlib.ExitStack() as stack:
        stack.enter_context(parts.optimizer.rehearsing())  # its states lie on the device, even with managed memory
        if is_managed:
            stack.enter_context(transients.managed_memory(oversubscribes))
        transients.foresee([partial(parts.train_step, batches, lr=0.0) for batches in recorded])
    if transients.planned is None:
        raise AllocatorError(f"--trace-out {out}: nothing was recorded: {transients.reason}")
    if mesh.is_main_rank:
        transients.planned.trace.save(out)
    traced = f"\nmemory that a step allocates on this rank, traced to {out}:"
    _show(mesh, f"{traced}\n{transients.describe()}")


def _measure_alone(config: RunConfig, mesh: Mesh, device: torch.device) -> LayerProfile:
    """The profile of a layer of each kind; no other part of the model is built."""
    dtype = torch_dtype(str(config.training.params_dtype))
    ops = select_ops(config.hardware.kernels, dtype)
    attention = attention_of_layers(config, mesh, device)
    parts = ModelParts(config.model, dtype, mesh.tp, attention, ops, delta_net_of(config, dtype, device))
    firsts = one_of_each_kind(config.model, range(config.model.num_layers))
    layers = {index: make_layer(parts, index) for index in firsts}
    bucket_size = config.parallel.ddp_bucket_size
    data_parallel = ShardedDataParallel(
        nn.ModuleList(layers.values()), mesh, dtype=dtype, device=device, bucket_size=bucket_size, overlap=False
    )
    data_parallel.initialize(config.training.seed)
    return measure(config, mesh, layers, data_parallel.main_gradients.main_gradient, device)


def _show(mesh: Mesh, text: str) -> None:
    if mesh.is_main_rank:
        print(text, flush=True)
