"""Where activations live between forward and backward."""

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
OffloadStates = Literal["auto", "none", "optimizer", "all"]

_SWAPPED = ReadWith("offload_alpha", but=("off",), use="--offload-alpha auto")
_ALONE = ReadWith("recompute_granularity", ("none",))
_SWEPT = ReadWith("offload_granularity", ("tile",))
_SHARED_OUT = ReadWith("offload_states", ("optimizer", "all"))


@dataclass(frozen=True)
class MemoryConfig:
    """Swapping to host memory (MEMO), or recomputation as in Megatron; not both."""

    offload_alpha: OffloadAlpha = "auto"
    """Share of the tokens, 0 to 1, whose activations move to host memory while the rest is recomputed; auto:
    planned from link rates and memory, which may be that nothing moves; off: no swapping. A number fights with
    recompute-granularity, which turns auto off."""
    offload_policy: Annotated[OffloadPolicy, _SWAPPED, _ALONE] = "auto"
    """auto: a share per tensor, by recompute time saved per byte; paper: one share of all tensors, as MEMO does."""
    offload_host_memory_gib: Annotated[PositiveFloat | None, Flag(aliases=("offload_host_memory_gb",))] = None
    """GiB of host memory of one node for activations and states, shared by its ranks, states first; never more than
    is free, and nine tenths of that by default."""
    offload_nvme_path: Annotated[PathText | None, _SWAPPED, _ALONE] = None
    """Directory on a local disk for the activations that host memory does not hold, in a file without a name that is
    gone when the run ends, however it ends; those that wait longest go there. Its rate is measured before training."""
    offload_nvme_gib: Annotated[
        PositiveFloat | None,
        Flag(aliases=("offload_nvme_gb",)),
        ReadWith("offload_nvme_path", use="--offload-nvme-path DIR"),
    ] = None
    """GiB of that disk for one node, shared by its ranks; default: nine tenths of what is free there."""
    offload_backend: OffloadBackend = "auto"
    """How copies run: cuda (streams), virtual (in a fixed order, CPU), threads (CPU); auto: by device."""
    offload_check_races: bool = False
    """Check every access to a moving buffer against the order of events; CPU only, slow."""
    offload_tiles: Annotated[PositiveInt | None, _SWAPPED, _ALONE] = None
    """Equal parts of the sequence that are computed and moved as a unit; shares are rounded down to them. Default: 8;
    under --offload-granularity tile as many more as give a rank some 32,768 tokens of each. More of them take less
    memory and more time."""
    offload_granularity: Annotated[OffloadGranularity, _SWAPPED, _ALONE] = "layer"
    """What a slot of the rounding buffers holds: the activations of a layer, or of a few of its tiles. tile: each layer
    is swept along the sequence, so that on the device only keys and values and the hidden states grow with it. auto:
    layer where that fits on the device, else tile, with as many tiles, layers that recompute attention and hidden
    states in host memory as `memo plan` would take."""
    offload_slot_tiles: Annotated[PositiveInt | None, _SWAPPED, _ALONE, _SWEPT] = None
    """Tiles that a slot holds under --offload-granularity tile; shares are rounded down to them. Default: 4, or as many
    fewer as --offload-tiles divides into at least two slots of; fewer take less memory and more time."""
    recompute_attention_layers: Annotated[NonNegativeInt, _SWAPPED, _ALONE, _SWEPT] = 0
    """Under --offload-granularity tile: layers of each pipeline chunk that compute attention again before their
    backward: those with gated delta nets first, then those with sliding windows. Only the input of such a layer waits
    in host memory, about two fifths of what waits otherwise."""
    offload_hidden_states: Annotated[bool, _SWAPPED, _ALONE, _SWEPT] = False
    """Under --offload-granularity tile: hidden states between layers and their gradients live in host memory, and
    stream section by section, also from stage to stage, so that on the device only keys and values, their gradients and
    the batch grow with the sequence. Costs one more copy of a section each way in every forward and backward."""
    layer_profile: Annotated[PathText | None, _SWAPPED, _ALONE] = None
    """File of `memo profile --out` to plan from instead of measuring; it must be of the same layer and device."""
    profile_cache: PathText = "auto"
    """Directory that keeps measured layers, so that the next start plans from them; auto: ~/.cache/memo (or
    $XDG_CACHE_HOME/memo); off: measure at each start."""
    offload_states: OffloadStates = "none"
    """What of the model's states lives in host memory: optimizer (masters, moments and reduced gradients of all layers,
    updated there), all (weights too, which stream to the device layer by layer), or auto: of each as much as the device
    lacks."""
    optimizer_offload_fraction: Annotated[Share | None, _SHARED_OUT] = None
    """Megatron's: share of the layers whose masters and moments are in host memory; given with --offload-states
    optimizer or all, whose default is 1."""
    gradient_offload_fraction: Annotated[Share | None, _SHARED_OUT] = None
    """Share of the layers whose gradients leave the device once they are complete; at most the optimizer's; default: 1
    under all, else 0."""
    weight_offload_fraction: Annotated[Share | None, _SHARED_OUT] = None
    """Share of the layers whose weights stream from host memory; at most the optimizer's; default: 1 under all, else
    0."""
    offload_weight_copy: Annotated[bool, ReadWith("offload_states", ("all", "auto"))] = True
    """Stream weights from a copy in --params-dtype in host memory; without it from the masters: 2 bytes a parameter
    less in host memory, twice the bytes over the link."""
    device_memory_gib: Annotated[PositiveFloat | None, Flag(aliases=("device_memory_gb",))] = None
    """GiB of the device that a rank may use; default: what is free. States and activations of a run that may use less
    are placed under it, or it is refused."""
    recompute_granularity: RecomputeGranularity = "none"
    """Megatron's: full keeps only the input of each layer, selective recomputes attention alone."""
    memory_planner: MemoryPlanner | None = None
    """Serve what a step allocates from addresses planned before training, so that nothing fragments; needs a C++
    compiler on first use. paper: a plan in two levels, layer by layer; flat: all requests at once; auto: the better
    one; off: torch's own allocator; default: auto on CUDA, else off. Where CUDA's part cannot be built, torch's own
    serves all. On CUDA it has expandable_segments, unless PYTORCH_ALLOC_CONF says something else or off is given."""
    memory_planner_min_bytes: Annotated[PositiveInt, BYTES] = 1 << 20
    """Smaller requests are left to torch's allocator."""

    @property
    def plans(self) -> bool:
        """Whether memory of a step is planned; known once the default is resolved for the device."""
        return self.memory_planner not in (None, "off")

    @property
    def offloads_states(self) -> bool:
        """Whether any state may live in host memory."""
        return self.offload_states != "none"

    @property
    def sweeps(self) -> bool:
        """Whether a slot holds a few tiles, so that layers that run under a swap plan are swept along the sequence."""
        return self.swaps and self.offload_granularity == "tile"

    @property
    def swaps(self) -> bool:
        """Whether layers may run under a swap plan."""
        if self.offload_alpha == "auto":
            return self.recompute_granularity == "none"
        return self.offload_alpha != "off"
