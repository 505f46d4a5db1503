"""`memo profile` on the ranks of a run: one layer alone, and the plan that follows from it."""

import torch
from torch import nn

from memo.artifacts.layer_profile import LayerProfile
from memo.config import RunConfig
from memo.config.derived import num_microbatches
from memo.errors import AllocatorError
from memo.estimate.memory import estimate_memory
from memo.mesh import Mesh, init_distributed, local_device
from memo.model.layer import ModelParts, TransformerLayer
from memo.model.transformer import torch_dtype
from memo.parallel.data import ShardedDataParallel
from memo.parallel.schedule import Pipeline, one_f_one_b
from memo.planner.profile_table import describe_profile
from memo.planner.swap import LayerOp, layer_ops
from memo.train.build import build_attention, build_mesh
from memo.train.layer_profile import keep, measure
from memo.train.setup import check_writable, prepare
from memo.train.swap import decide
from memo.train.trainer import Trainer, shutdown


def profile_run(config: RunConfig, out: str | None, trace_out: str | None = None) -> None:
    """Measure, write and print, on every rank of the run that `config` describes; rank 0 tells.

    Args:
        out: file for the profile (schema "layer_profile"); None: the cache alone.
        trace_out: file for the memory requests of one step of rank 0 (schema "memory_trace"); None: not recorded.

    Raises what training raises for a run that cannot be, PlanError and HostMemoryError for one that has no plan,
    AllocatorError where requests cannot be recorded.
    """
    check_writable("--out", out, is_directory=False)
    check_writable("--trace-out", trace_out, is_directory=False)
    config = prepare(config).config
    device = local_device(config.hardware.device)
    rank, world_size = init_distributed(device, config.parallel.distributed_timeout_minutes)
    try:
        _profile(config, build_mesh(config, rank, world_size), device, out)
        if trace_out is not None:
            _record(config, trace_out)
    finally:
        shutdown()


def _profile(config: RunConfig, mesh: Mesh, device: torch.device, out: str | None) -> None:
    def tell(text: str) -> None:
        if mesh.rank == 0:
            print(text, flush=True)

    # A run without swapping has no tiles and no plan, but its layer has times.
    on_tiles = {} if config.memory.swaps else {"offload_alpha": "auto", "recompute_granularity": "none"}
    profile = _measure_alone(config.override(on_tiles), mesh, device)
    tell(describe_profile(profile))
    origin = keep(profile, config, mesh)
    if out is not None:
        if mesh.rank == 0:
            profile.save(out)
        origin += f" and written to {out}"
    if not config.memory.swaps:
        tell(f"\nprofile {origin}\nno plan: --offload-alpha off, or --recompute-granularity in its place")
        return
    states = estimate_memory(config, mesh.grid.world_size, mesh.at.pp)
    states_bytes = states.weights + states.gradients + states.optimizer
    chosen = decide(config, mesh, _operations(config, mesh), profile, origin, device, states_bytes)
    tell(f"\nplan for one layer and microbatch on this rank:\n{chosen.describe()}")


def _record(config: RunConfig, trace_out: str) -> None:
    """A trainer records before its first step; here it goes no further."""
    with Trainer(config=config.override({"memory_planner": "auto"})) as trainer:
        transients = trainer.parts.transients
        assert transients is not None
        if transients.planned is None:
            raise AllocatorError(f"--trace-out {trace_out}: nothing was recorded: {transients.reason}")
        if trainer.mesh.rank == 0:
            transients.planned.trace.save(trace_out)
            trainer.print(
                f"\nmemory that a step allocates on this rank, traced to {trace_out}:\n{transients.describe()}"
            )


def _measure_alone(config: RunConfig, mesh: Mesh, device: torch.device) -> LayerProfile:
    """Of the model only one layer exists."""
    dtype = torch_dtype(str(config.training.params_dtype))
    parts = ModelParts(config.model, dtype, mesh.tp, build_attention(config, mesh, device))
    layer = TransformerLayer(parts, 0)
    bucket_size = config.parallel.ddp_bucket_size
    data_parallel = ShardedDataParallel(
        nn.ModuleList([layer]), mesh, dtype=dtype, device=device, bucket_size=bucket_size, overlap=False
    )
    data_parallel.initialize(config.training.seed)
    return measure(config, mesh, layer, data_parallel.main_gradient, device)


def _operations(config: RunConfig, mesh: Mesh) -> list[LayerOp]:
    """This stage's layer passes in one step."""
    pipeline = Pipeline(mesh.grid.pp, config.parallel.vpp, num_microbatches(config, mesh.grid.world_size))
    return layer_ops(pipeline, mesh.at.pp, config.model.num_layers, one_f_one_b(pipeline, mesh.at.pp))
