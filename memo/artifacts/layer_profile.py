"""The measured times of one layer and rates of the link to host memory, with all settings on which they depend.

As a file (schema "layer_profile"):

    {"schema": "layer_profile", "version": 1,
     "key": {"hidden_size": 4096, ..., "device": "NVIDIA H100", "torch": "2.13.0", "memo": "0.1.0"},
     "measured_at": "2026-01-31T12:00:00+01:00", "tensor_bytes": {"input": 8388608, ...},
     "forward_s": 0.012, "backward_s": 0.025, "recompute_s": {"qkv": 0.002, ...},
     "offload_bytes_per_s": 2.1e10, ...}
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from datetime import datetime

from memo.artifacts.artifact import Artifact
from memo.artifacts.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Time


@dataclass(frozen=True)
class ProfileKey:
    """The settings under which a layer was measured. A profile fits a run only if all of them are equal.

    Fields have the names of the configuration's fields; values are resolved (never "default").

    Attributes:
        cp_comm_type, cp_a2a_size: "none" and 1 without context parallelism.
        offload_tiles: number of tiles of the sequence that the layer works on.
        offload_sections: number of sections of a layer; a slot holds one section (memo.spec.sweep); 1: a whole layer.
        device: name of the CPU or GPU.
        num_threads: CPU threads of one rank.
        ranks_per_node: ranks that share memory bandwidth and the link.
        torch, memo: versions.
        deterministic: whether gradients have the same bits each time.
        custom_layer: name and digest of a user's layer; "" for memo's own.
        trained: the frozen parameters and adapters; "" if all parameters are trained.
    """

    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    normalization: str
    activation: str
    position_embedding_type: str
    add_bias_linear: bool
    add_qkv_bias: bool
    qk_layernorm: bool
    seq_length: int
    micro_batch_size: int
    tensor_model_parallel_size: int
    context_parallel_size: int
    cp_comm_type: str
    cp_a2a_size: int
    params_dtype: str
    offload_tiles: int
    attention_backend: str
    kernels: str
    device: str
    num_threads: int
    ranks_per_node: int
    torch: str
    memo: str
    window_size: int = 0
    layer_types: str = ""
    norm_placement: str = "before"
    qk_layernorm_across_heads: bool = False
    attention_sinks: bool = False
    attention_output_gate: bool = False
    delta_nets: str = ""
    latents: str = ""
    experts: str = ""
    moe_layer_freq: str = ""
    no_rope_freq: str = ""
    offload_sections: int = 1
    custom_layer: str = ""
    trained: str = ""
    deterministic: bool = False

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that name this key among files."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def differences(self, other: "ProfileKey") -> str:
        """The fields that differ, with the own value as that "there" and that of `other` as that "here"; or empty."""
        pairs = [(name, value, getattr(other, name)) for name, value in vars(self).items()]
        return "; ".join(f"{name} is {there!r} there and {here!r} here" for name, there, here in pairs if there != here)


@dataclass(frozen=True)
class LayerProfile(Artifact):
    """Seconds of one layer and microbatch, and bytes per second of one rank's link to host memory.

    With several ranks these are the times of the slowest rank and the rates of the slowest link, which determine the
    speed of a run.

    Attributes:
        measured_at: local time with its UTC offset, ISO 8601.
        tensor_bytes: bytes of the layer's skeletal activations on one rank, by name (memo.spec.skeleton).
        forward_s, backward_s: times of the fastest kind of layer; backward without recomputation.
        longer_s: by how much forward and backward of the mean layer take longer, if there are several kinds.
        recompute_s: time to recompute all tokens of a group of tensors, by group; 0: backward computes it in any case.
        offload_bytes_per_s, prefetch_bytes_per_s: rates from device to host and back while nothing else runs.
        offload_under_compute_bytes_per_s, prefetch_under_compute_bytes_per_s: rates while the device computes; 0 if
            copies take turns with compute, as they do on a CPU.
    """

    schema = "layer_profile"
    remedy = "run `memo profile` again"

    key: ProfileKey
    measured_at: Time
    tensor_bytes: dict[str, PositiveInt]
    forward_s: PositiveFloat
    backward_s: PositiveFloat
    recompute_s: dict[str, NonNegativeFloat]
    offload_bytes_per_s: PositiveFloat
    prefetch_bytes_per_s: PositiveFloat
    offload_under_compute_bytes_per_s: NonNegativeFloat
    prefetch_under_compute_bytes_per_s: NonNegativeFloat
    longer_s: float = 0.0

    @property
    def measured_on(self) -> str:
        """The date and minute of the measurement, for people."""
        return datetime.fromisoformat(self.measured_at).strftime("%Y-%m-%d %H:%M")
