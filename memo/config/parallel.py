"""How the model and its batch are spread over the ranks."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

from memo.artifacts.fields import in_range
from memo.config.flag import COUNT, Flag, NonNegativeInt, PositiveInt, ReadWith

CpCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
SWEPT_CP_COMM_TYPES: tuple[CpCommType, ...] = ("all_gather", "a2a")
"""Values of cp_comm_type under which layers may be swept along the sequence: the keys and values of a tile are
exchanged once. Rings would pass all keys and values round for every tile."""
AccumulationOrder = Literal["depth_first", "breadth_first"]
DataParallelSharding = Literal["optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True)
class ParallelConfig:
    """Four axes: tp, cp, pp and dp. Data parallelism takes the rest: dp = world size / (tp x cp x pp)."""

    tensor_model_parallel_size: Annotated[PositiveInt, Flag(aliases=("tp",))] = 1
    """Ranks that split every matrix, and the tokens of the operations between matrices (sequence parallelism)."""
    context_parallel_size: Annotated[PositiveInt, Flag(aliases=("cp",))] = 1
    """Ranks that split the sequence, inside attention too."""
    cp_comm_type: CpCommType = "p2p"
    """p2p: a ring of K/V blocks; all_gather: gathered K/V; a2a: Ulysses all-to-all over heads; a2a+p2p: all-to-all
    inside rings."""
    cp_a2a_size: Annotated[PositiveInt | None, ReadWith("cp_comm_type", ("a2a+p2p",))] = None
    """a2a+p2p: ranks of one all-to-all group, a divisor of cp; default: the largest that the heads allow."""
    pipeline_model_parallel_size: Annotated[PositiveInt, Flag(aliases=("pp",))] = 1
    """Pipeline stages, each of consecutive layers."""
    num_virtual_stages_per_pipeline_rank: Annotated[PositiveInt, Flag(aliases=("vpp",))] = 1
    """Chunks of layers per stage; above 1 the schedule is interleaved 1F1B."""
    gradient_accumulation_order: AccumulationOrder = "depth_first"
    """breadth_first takes all microbatches through one layer before the next: streamed states are copied once a step,
    and activations of all microbatches live at the same time. depth_first finishes each microbatch first."""
    data_parallel_sharding_strategy: DataParallelSharding = "optim"
    """States that are sharded over the ranks of dp x cp, by Megatron's names. optim: masters and moments (ZeRO-1);
    optim_grads: gradients of layers too (ZeRO-2); optim_grads_params: weights of layers as well (ZeRO-3), which are
    gathered for each layer when it runs."""
    overlap_grad_reduce: bool = True
    """Start the reduce-scatter of a gradient bucket as soon as its last gradient is computed."""
    ddp_bucket_size: Annotated[PositiveInt, COUNT] = 40_000_000
    """Parameters in one gradient bucket, which never spans two layers."""
    # Three seconds leave ranks time to report that they live; a year still fits in torch's count of milliseconds.
    distributed_timeout_minutes: Annotated[float, in_range(0.05, 525_600)] = 10.0
    """Minutes that a message between ranks waits for a rank that does not answer, in every process group."""

    simulate_world: str | None = None
    """Axes of a larger job, such as tp=8 or tp=4,cp=2,pp=2. This one process runs one rank of it, with true shapes,
    order and memory; nothing is sent, and losses mean nothing."""
    simulate_rank: Annotated[NonNegativeInt, ReadWith("simulate_world", use="--simulate-world tp=8")] = 0
    """The rank of --simulate-world that this process runs."""

    @property
    def tp(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def cp(self) -> int:
        return self.context_parallel_size

    @property
    def pp(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        return self.num_virtual_stages_per_pipeline_rank

    @property
    def distributed_timeout(self) -> timedelta:
        return timedelta(minutes=self.distributed_timeout_minutes)

    @property
    def shards_gradients(self) -> bool:
        return self.data_parallel_sharding_strategy != "optim"

    @property
    def shards_weights(self) -> bool:
        return self.data_parallel_sharding_strategy == "optim_grads_params"

    @property
    def model_ranks(self) -> int:
        """Ranks that together hold one copy of the model and work on one sample."""
        return self.tp * self.cp * self.pp

    def dp(self, world_size: int) -> int:
        """Copies of the model."""
        return world_size // self.model_ranks

    def layers_per_chunk(self, num_layers: int) -> int:
        """Layers of one pipeline chunk."""
        return num_layers // (self.pp * self.vpp)
