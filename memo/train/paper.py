"""Traces memory requests on paper: those of one step of any rank in any layout, in one process without a device."""

import dataclasses
import functools
import shlex

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memo.artifacts.memory_trace import Trace, requests
from memo.config import RunConfig
from memo.config.derived import rank_length, resident_tiles
from memo.errors import ConfigError
from memo.executor.phases import Phases, mark_phases
from memo.mesh import Mesh
from memo.mesh.simulated import init_simulated
from memo.model.transformer import Microbatch, TransformerChunk
from memo.parallel.dtypes import torch_dtype
from memo.planner.caching import simulate_caching
from memo.planner.traces import RECORDED_LAYERS, extend_layers
from memo.profiler.fake import FakeGradients, FakeRecorder, fake_mode
from memo.spec.schedule import one_f_one_b
from memo.spec.stack import kinds_of
from memo.train.build import add_router_losses, build_chunks, build_mesh, build_stage
from memo.train.outputs import check_writable
from memo.train.planned_memory import describe_run
from memo.train.tiled_layers import keep_on_device, put_on_tiles, scratch_for
from memo.units import format_bytes

_DEVICE = torch.device("cpu")  # autograd on fake CUDA tensors needs a CUDA build


def trace_on_paper(config: RunConfig, world_size: int, stage: int = 0) -> Trace:
    """Return the memory requests of forward and backward of one step of the first rank of pipeline stage `stage`.

    Only RECORDED_LAYERS layers of each chunk are run; they represent all layers. Starts a simulated process group, so
    call it in a process without one.

    Known errors: scratch memory inside kernels is missing, and kernels of a CUDA device may need other scratch than a
    CPU's. Weight gradients are allocated as on a CPU, except those of experts; a CUDA device adds all products to the
    main gradients. gloo's copies of tensors that it gathers and scatters are missing: some per cent of the peak with tp
    on CPUs (memo.estimate.program counts them). NCCL makes no copies.

    `config` is checked, with a vocabulary and params_dtype. Raises ConfigError for --offload-alpha auto and
    --offload-granularity auto, and TraceError if layers make different requests.
    """
    parallel, model = config.parallel, config.model
    if config.memory.offload_alpha == "auto" and config.memory.swaps:
        raise ConfigError(
            "--offload-alpha auto is decided by measuring, which needs the device: give off, or a number from 0 to 1"
        )
    if config.memory.offload_granularity == "auto" and config.memory.swaps:
        raise ConfigError(
            "--offload-granularity auto is decided by what is free on the device: give layer, or tile with "
            "--offload-tiles; `memo plan` says which fits"
        )
    layers = model.num_layers // (parallel.pp * parallel.vpp)
    if layers > RECORDED_LAYERS and len(kinds_of(model)) == 1:  # layers of several kinds make different requests
        short = dataclasses.replace(model, num_layers=RECORDED_LAYERS * parallel.pp * parallel.vpp)
        trace = extend_layers(_traced(dataclasses.replace(config, model=short), world_size, stage), layers)
    else:
        trace = _traced(config, world_size, stage)
    return dataclasses.replace(trace, run=describe_run(config, world_size, stage))


def write_paper_trace(config: RunConfig, world_size: int, stage: int, out: str) -> None:
    """Write the trace of `trace_on_paper` to a file, and print its totals."""
    check_writable("--trace-out", out, is_directory=False)
    trace = trace_on_paper(config, world_size, stage)
    trace.save(out)
    default, expandable = (
        format_bytes(simulate_caching(trace, mode).reserved_bytes) for mode in ("default", "expandable")
    )
    print(
        f"{len(requests(trace))} requests in {len(trace.phases)} phases of one step, traced on paper to {out}\n"
        f"PyTorch would reserve {default}, with expandable_segments {expandable}\n"
        f"for a plan: memo solve --trace {shlex.quote(out)} --out plan.json"
    )


def _traced(config: RunConfig, world_size: int, stage: int) -> Trace:
    rank = stage * (world_size // config.parallel.pp)  # pp is the outermost axis of the grid
    if world_size > 1:
        init_simulated(rank, world_size)
    try:
        mesh = build_mesh(config, rank, world_size)
        assert mesh.at.pp == stage
        with fake_mode():
            return _run(config, mesh)
    finally:
        if world_size > 1:
            dist.destroy_process_group()


def _run(config: RunConfig, mesh: Mesh) -> Trace:
    dtype = torch_dtype(str(config.training.params_dtype))
    with FakeRecorder() as recorder:
        pipeline, chunks = build_chunks(config, mesh, dtype, _DEVICE)
        add_router_losses(config, mesh, chunks, _DEVICE)
        gradients = FakeGradients(nn.ModuleList(chunks), dtype)
        if config.memory.swaps:
            moved = config.memory.offload_alpha
            assert not isinstance(moved, str), "auto is refused, and off does not swap"
            put_on_tiles(config, mesh, chunks, scratch_for(config, moved, _DEVICE), gradients)
        else:
            keep_on_device(config, mesh, chunks, gradients, _DEVICE)
        batch = _batch(config)
        executor = build_stage(config, mesh, pipeline, _DEVICE)
        phases = Phases(recorder.phase)
        mark_phases(chunks, phases)

        def forward(chunk: TransformerChunk, hidden: Tensor | None, microbatch: int) -> Tensor:
            output: Tensor = chunk(hidden, batch)
            return output

        forwards = [functools.partial(forward, chunk) for chunk in chunks]
        executor.run(one_f_one_b(pipeline, mesh.at.pp), forwards, phases.enter)
    return recorder.trace({})


def _batch(config: RunConfig) -> Microbatch:
    shape = (rank_length(config), config.training.micro_batch_size)

    def zeros(dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    positions = zeros()
    has_two_orders = config.parallel.tp > 1 and (config.memory.swaps or resident_tiles(config) > 1)
    own_order = zeros() if has_two_orders else positions
    return Microbatch(zeros(), zeros(), own_order, zeros(torch.float64), positions, documents=None)
