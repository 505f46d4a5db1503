"""Where activations and model states live: on the device, in host memory or on disk; and what is recomputed."""

from dataclasses import dataclass
from typing import Annotated, Literal

from memo.artifacts.fields import PositiveFloat
from memo.config.flag import BYTES, Flag, NonNegativeInt, PathText, PositiveInt, ReadWith, Share

OffloadAlpha = Literal["off", "auto"] | Share
OffloadPolicy = Literal["auto", "paper"]
OffloadGranularity = Literal["layer", "tile", "auto"]
OffloadBackend = Literal["auto", "cuda", "virtual", "threads"]
RecomputeGranularity = Literal["none", "full", "selective"]
MemoryPlanner = Literal["off", "auto", "paper", "flat"]
MemoryPlannerFrom = Literal["training", "rehearsal"]
OffloadStates = Literal["auto", "none", "optimizer", "all"]

_SWAPPED = ReadWith("offload_alpha", but=("off",), use="--offload-alpha auto")
_ALONE = ReadWith("recompute_granularity", ("none",))
_SWEPT = ReadWith("offload_granularity", ("tile",))
_SHARED_OUT = ReadWith("offload_states", ("optimizer", "all"))
_PLANNED = ReadWith("memory_planner", but=("off",), use="--memory-planner auto")

READ_WHERE_SOMETHING_MOVES = ("offload_host_memory_gib", "offload_backend", "offload_check_races")
"""Fields that nothing reads in a run whose activations and states all stay in their place."""


@dataclass(frozen=True)
class MemoryConfig:
    """Swapping to host memory (MEMO), or recomputation as in Megatron; not both."""

    offload_alpha: OffloadAlpha = "auto"
    """Share of the tokens, 0 to 1, whose activations are offloaded to host memory; those of the other tokens are
    recomputed. auto: planned from link rates and memory; the plan may offload nothing. off: no swapping. A number
    conflicts with --recompute-granularity full or selective, under which auto means off."""
    offload_policy: Annotated[OffloadPolicy, _SWAPPED, _ALONE] = "auto"
    """auto: one share for each tensor, chosen by recompute time saved per byte; paper: one share for all tensors, as in
    MEMO."""
    offload_host_memory_gib: Annotated[PositiveFloat | None, Flag(aliases=("offload_host_memory_gb",))] = None
    """GiB of host memory of one node for states and activations, shared by its ranks; states are placed first. Never
    more than the free memory; default: nine tenths of it."""
    offload_nvme_path: Annotated[PathText | None, _SWAPPED, _ALONE] = None
    """Directory on a local disk for activations that do not fit in host memory: those that wait longest for their
    backward. They lie in an unnamed file, which is gone when the run ends, however it ends. The rate of the disk is
    measured before training."""
    offload_nvme_gib: Annotated[
        PositiveFloat | None,
        Flag(aliases=("offload_nvme_gb",)),
        ReadWith("offload_nvme_path", use="--offload-nvme-path DIR"),
    ] = None
    """GiB of the disk of --offload-nvme-path for one node, shared by its ranks; default: nine tenths of its free
    space."""
    offload_backend: OffloadBackend = "auto"
    """How copies run: cuda (streams), virtual (in a fixed order, CPU), threads (CPU); auto: by device."""
    offload_check_races: bool = False
    """Check every access to a moving buffer against the order of events; CPU only, slow."""
    offload_tiles: Annotated[PositiveInt | None, _SWAPPED, _ALONE] = None
    """Tiles, equal parts of the sequence, in which activations are computed and moved; shares are rounded down to whole
    tiles. Default: 8; under --offload-alpha auto fewer for a mixture of experts, so that each has some 2,048 rows or
    more in a tile; under --offload-granularity tile one for some 32,768 tokens of a rank, but at least 8. More tiles
    take less memory and more time."""
    offload_granularity: Annotated[OffloadGranularity, _SWAPPED, _ALONE] = "layer"
    """layer: a slot of the rounding buffers holds the activations of a whole layer. tile: a slot holds the activations
    of a few tiles, and each layer is swept along the sequence, so that only keys, values and hidden states on the
    device grow with the sequence. auto: layer where that fits on the device, else tile; tiles, layers that recompute
    attention, and hidden states in host memory are then chosen as by `memo plan`."""
    offload_slot_tiles: Annotated[PositiveInt | None, _SWAPPED, _ALONE, _SWEPT] = None
    """Tiles that a slot holds under --offload-granularity tile; shares are rounded down to whole tiles of a slot.
    Default: 4, or the next smaller number that divides --offload-tiles into at least two slots. Fewer tiles take less
    memory and more time."""
    recompute_attention_layers: Annotated[NonNegativeInt, _SWAPPED, _ALONE, _SWEPT] = 0
    """Under --offload-granularity tile: number of layers of each pipeline chunk that recompute attention before their
    backward: first layers with gated delta nets, then layers with sliding windows. They keep only their input in host
    memory, about two fifths of what the other layers keep."""
    offload_hidden_states: Annotated[bool, _SWAPPED, _ALONE, _SWEPT] = False
    """Under --offload-granularity tile: keep hidden states between layers, and their gradients, in host memory. They
    stream section by section, also from stage to stage, so that on the device only keys, values, their gradients and
    the batch grow with the sequence. Costs one more copy of a section each way in every forward and backward."""
    layer_profile: Annotated[PathText | None, _SWAPPED, _ALONE] = None
    """File of `memo profile --out` to plan from instead of measuring; it must describe the same layer and device."""
    profile_cache: PathText = "auto"
    """Directory of measured layer profiles, from which the next start plans; auto: ~/.cache/memo (or
    $XDG_CACHE_HOME/memo); off: measure at each start."""
    offload_states: OffloadStates = "none"
    """Model states that live in host memory. optimizer: masters, moments and reduced gradients of all layers, which are
    updated there; all: weights too, which stream to the device layer by layer; auto: of each kind as much as does not
    fit on the device."""
    optimizer_offload_fraction: Annotated[Share | None, _SHARED_OUT] = None
    """Share of the layers whose masters and moments are in host memory, as in Megatron-LM; default: 1."""
    gradient_offload_fraction: Annotated[Share | None, _SHARED_OUT] = None
    """Share of the layers whose gradients leave the device once they are complete; at most
    --optimizer-offload-fraction; default: 1 under --offload-states all, else 0."""
    weight_offload_fraction: Annotated[Share | None, _SHARED_OUT] = None
    """Share of the layers whose weights stream from host memory; at most --optimizer-offload-fraction; default: 1 under
    --offload-states all, else 0."""
    offload_weight_copy: Annotated[bool, ReadWith("offload_states", ("all", "auto"))] = True
    """Stream weights from a copy in --params-dtype in host memory. Off: stream them from the masters, which takes 2
    bytes a parameter less of host memory and moves twice the bytes over the link."""
    device_memory_gib: Annotated[PositiveFloat | None, Flag(aliases=("device_memory_gb",))] = None
    """GiB of device memory that a rank may use; default: the free memory. States and activations are placed to fit in
    it; a run that does not fit is refused."""
    recompute_granularity: RecomputeGranularity = "none"
    """As in Megatron-LM: full keeps only the input of each layer, selective recomputes attention alone."""
    memory_planner: MemoryPlanner | None = None
    """Serve the allocations of a step from planned addresses, so that memory does not fragment; needs a C++ compiler on
    first use. paper: plan in two levels, layer by layer; flat: plan all requests at once; auto: the
    better of the two plans; off: torch's allocator. Default: auto on CUDA, else off. Where the CUDA part cannot be
    built, torch's allocator serves all requests. On CUDA torch's allocator has expandable_segments, unless
    PYTORCH_ALLOC_CONF says otherwise or off is given."""
    memory_planner_min_bytes: Annotated[PositiveInt, BYTES, _PLANNED] = 1 << 20
    """Smaller requests are left to torch's allocator."""
    memory_planner_from: Annotated[MemoryPlannerFrom, _PLANNED] = "training"
    """The steps whose allocations are recorded for the plan. training: the second step of training, or the second and
    third on a CPU; the plan serves the steps after them, and no time is lost. rehearsal: two to four steps before the
    first, which change nothing; the plan is known before training."""

    @property
    def plans(self) -> bool:
        """Whether the memory of a step is planned; known once the default is resolved for the device."""
        return self.memory_planner not in (None, "off")

    @property
    def offloads_states(self) -> bool:
        """Whether any state may live in host memory."""
        return self.offload_states != "none"

    @property
    def sweeps(self) -> bool:
        """Whether layers under a swap plan are swept along the sequence, a slot holding a few of their tiles."""
        return self.swaps and self.offload_granularity == "tile"

    @property
    def swaps(self) -> bool:
        """Whether layers may run under a swap plan."""
        if self.offload_alpha == "auto":
            return self.recompute_granularity == "none"
        return self.offload_alpha != "off"
