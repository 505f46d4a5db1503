"""A layer's profile for people: the layer, times of its pieces, the link, and sizes of tensors."""

from memo.artifacts.layer_profile import LayerProfile, ProfileKey
from memo.planner.alpha_table import format_seconds
from memo.text_table import text_table
from memo.units import GIB, format_bytes


def describe_profile(profile: LayerProfile) -> str:
    """Four small tables of one layer and microbatch on one rank."""
    whole_s = sum(profile.recompute_s.values())
    times = [
        ("piece", "time"),
        ("forward", format_seconds(profile.forward_s)),
        ("backward, nothing recomputed", format_seconds(profile.backward_s)),
        *((f"recompute {group}", format_seconds(seconds)) for group, seconds in profile.recompute_s.items()),
        ("backward, all recomputed", format_seconds(profile.backward_s + whole_s)),
    ]
    links = [
        ("link", "alone", "under compute"),
        _link("offload", profile.offload_bytes_per_s, profile.offload_under_compute_bytes_per_s),
        _link("prefetch", profile.prefetch_bytes_per_s, profile.prefetch_under_compute_bytes_per_s),
    ]
    sizes = [
        ("tensor", "a layer"),
        *((name, format_bytes(num_bytes)) for name, num_bytes in profile.tensor_bytes.items()),
        ("all", format_bytes(sum(profile.tensor_bytes.values()))),
    ]
    return "\n\n".join([_what(profile.key), text_table(times), text_table(links), text_table(sizes)])


def _what(key: ProfileKey) -> str:
    cp = f"cp {key.context_parallel_size}"
    if key.context_parallel_size > 1:
        cp += f" ({key.cp_comm_type})"
    return (
        f"one layer: h = {key.hidden_size}, {key.num_attention_heads} heads ({key.num_query_groups} k/v) of "
        f"{key.kv_channels}, MLP {key.ffn_hidden_size} ({key.activation}), {key.params_dtype}\n"
        f"on {key.seq_length} tokens x {key.micro_batch_size} in {key.offload_tiles} tiles, "
        f"tp {key.tensor_model_parallel_size} x {cp}\n"
        f"by {key.device}, {key.num_threads} threads a rank, {key.ranks_per_node} ranks a node, torch {key.torch}"
    )


def _link(name: str, alone: float, under_compute: float) -> tuple[str, str, str]:
    """Rates in GiB/s; without a rate under compute copies and compute take turns."""
    return name, f"{alone / GIB:.3g} GiB/s", f"{under_compute / GIB:.3g} GiB/s" if under_compute else "takes turns"
