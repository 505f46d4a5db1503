"""The layer profile of a run: read from a given file, read from the cache, or measured now.

Measuring is collective, so all ranks must decide alike: rank 0 looks into its cache and tells all other ranks.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from memo import __version__
from memo.artifacts.layer_profile import LayerProfile, ProfileKey
from memo.artifacts.profile_cache import cache_file
from memo.config import ModelConfig, RunConfig
from memo.config.derived import (
    local_world_size_from_env,
    rank_length,
    resolved_a2a_size,
    resolved_offload_tiles,
    resolved_sections,
)
from memo.config.layer_words import LINEAR
from memo.errors import ArtifactError, ConfigError, warn
from memo.mesh import Mesh
from memo.mesh.objects import from_rank_zero
from memo.model.custom import CustomLayer
from memo.model.layer import TransformerLayer
from memo.model.parts import LayerContext
from memo.model.rope import rope_table
from memo.parallel.collectives import all_reduce
from memo.parallel.dtypes import torch_dtype
from memo.profiler.layer import ScratchGradients, profile_layer
from memo.spec.custom_layer import custom_facts
from memo.spec.skeleton import bytes_of, skeletal_tensors
from memo.spec.slots import slot_dims
from memo.spec.stack import kinds_of, stack_of
from memo.train.device import device_name
from memo.train.tiled_layers import on_tiles, scratch_for


def profile_key(config: RunConfig, device: torch.device) -> ProfileKey:
    """The key of the profile that this rank would measure; `config` is prepared, and the number of threads is set."""
    model, parallel = config.model, config.parallel
    sections = (model, parallel, config.training, config.data, config.hardware)
    given = {name: value for section in sections for name, value in vars(section).items()}
    resolved = {
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_size,
        "add_qkv_bias": model.qkv_bias,
        "delta_nets": _delta_nets(model, config.hardware.delta_backend),
        "latents": _latents(model),
        "experts": _experts(model),
        "cp_comm_type": parallel.cp_comm_type if parallel.cp > 1 else "none",
        "cp_a2a_size": resolved_a2a_size(model, parallel),
        "offload_tiles": resolved_offload_tiles(config),
        "offload_sections": resolved_sections(config),
        "device": device_name(device),
        "num_threads": torch.get_num_threads(),
        "ranks_per_node": 0 if parallel.simulate_world else local_world_size_from_env(),  # 0: they are not there
        "torch": torch.__version__,
        "memo": __version__,
        "custom_layer": f"{model.custom_layer} {custom_facts(model).digest}" if model.custom_layer else "",
        "trained": _trained(model),
    }
    return ProfileKey(**{field.name: (given | resolved)[field.name] for field in dataclasses.fields(ProfileKey)})


def _trained(model: ModelConfig) -> str:
    adapters = f"rank {model.lora_rank} beside {model.lora_target_modules}" if model.lora_rank else ""
    frozen = f"without {model.freeze}" if model.freeze else ""
    only, coded = f"only {model.train_only}" if model.train_only else "", model.quantize.removeprefix("none")
    return ", ".join(filter(None, (adapters, frozen, only, coded)))


def _delta_nets(model: ModelConfig, backend: str) -> str:
    if LINEAR not in model.types_of_layers:
        return ""
    kernels = ", fla" if backend == "fla" else ""
    return f"{model.linear_num_value_heads} of {model.linear_num_key_heads} x {model.linear_key_head_dim}{kernels}"


def _latents(model: ModelConfig) -> str:
    if not model.multi_latent_attention:
        return ""
    heads = f"{model.qk_head_dim} + {model.qk_pos_emb_head_dim}, values {model.v_head_dim}"
    return f"{model.q_lora_rank or 'no'} of queries, {model.kv_lora_rank} of keys, heads of {heads}"


def _experts(model: ModelConfig) -> str:
    if not model.num_experts:
        return ""
    router = f", {model.moe_router_score_function} in {model.moe_router_num_groups} groups"
    shared = f"{model.shared_ffn_size}{' gated' * model.shared_is_gated}"
    experts = f"{model.moe_router_topk} of {model.num_experts} x {model.mlp_size}, shared {shared}"
    return experts + (router if model.moe_router_score_function != "softmax" else "")


def given_profile(config: RunConfig, device: torch.device) -> LayerProfile | None:
    """The profile that --layer-profile names; None without the flag.

    Raises ArtifactError for a file that holds no profile, and ConfigError for a profile that does not fit this run.
    """
    path = config.memory.layer_profile
    if path is None:
        return None
    profile = LayerProfile.load(path)
    differences = profile.key.differences(profile_key(config, device))
    if differences:
        raise ConfigError(
            f"--layer-profile {path} was not measured for this run: {differences}: run `memo profile --out {path}` "
            "with the flags of this run, or leave --layer-profile out"
        )
    return profile


def obtain(
    config: RunConfig, mesh: Mesh, device: torch.device, measure: Callable[[], LayerProfile]
) -> tuple[LayerProfile, str]:
    """The profile to plan from and words about its origin; collective, and the same on all ranks.

    Warns if a cached file cannot be used, and measures the layer.
    """
    given = given_profile(config, device)
    if given is not None:
        return given, f"from {config.memory.layer_profile} of {given.measured_on}"
    key = profile_key(config, device)
    cached = _cached_on_rank_0(config.memory.profile_cache, key, mesh, device)
    if cached is not None:
        return cached, (
            f"from {cache_file(config.memory.profile_cache, key)} of {cached.measured_on}; to measure again: "
            "`memo profile` with the same flags, or --profile-cache off"
        )
    profile = measure()
    return profile, keep(profile, config.memory.profile_cache, mesh)


def keep(profile: LayerProfile, profile_cache: str, mesh: Mesh) -> str:
    """Put a measured profile into the cache of rank 0; returns words about its origin, for people."""
    path = cache_file(profile_cache, profile.key)
    if path is None or not mesh.is_main_rank:
        return "measured now"
    try:
        profile.save(path)
    except ArtifactError as error:
        warn(f"the layer's profile is not kept: {error}, or --profile-cache off")
        return "measured now"
    return f"measured now, kept in {path}"


def measure(
    config: RunConfig,
    mesh: Mesh,
    layers: Mapping[int, TransformerLayer | CustomLayer],
    main_gradient: Callable[[nn.Parameter], Tensor | None],
    device: torch.device,
    states: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> LayerProfile:
    """Measure `layers`, by index one of each kind that this rank has, on random input of the true size; collective, and
    the same result on all ranks.

    Weight gradients are added to `main_gradient`, which must be zeroed before training uses it. `states` returns a
    context in which the layer of an index has its weights and gradients.
    """
    tokens, batch = rank_length(config), config.training.micro_batch_size
    dtype = torch_dtype(str(config.training.params_dtype))
    memory = scratch_for(config, {}, device)
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (tokens // mesh.grid.tp, batch, config.model.hidden_size)
    x = torch.randn(shape, generator=generator, device=device).to(dtype)
    positions = torch.arange(tokens, device=device).unsqueeze(1).expand(tokens, batch)
    key, sizes, stack = profile_key(config, device), tensor_bytes(config), stack_of(config.model)
    found = {}
    for index, layer in layers.items():
        rope = rope_table(stack[index], positions, dtype) if stack[index].rotation else None
        wrapped = on_tiles(config, layer, index, memory, ScratchGradients(main_gradient), mesh.tp)
        slot, context, groups = wrapped.own(memory.tensors), LayerContext(rope, None), (mesh.tp, mesh.cp)
        with states(index):
            measured = profile_layer(wrapped, slot, context, x, groups, key, sizes)
        found[stack[index]] = _by_group(config.model, measured)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that the measurement freed must count as free for the plan
    # Stages may have layers of different kinds, with different groups.
    unseen = dataclasses.replace(next(iter(found.values())), forward_s=0.0, backward_s=0.0, recompute_s={})
    parts = list(dict.fromkeys(tensor.group for tensor in skeletal_tensors(config.model)))
    own = {kind: found.get(kind, unseen) for kind in kinds_of(config.model)}
    return _of_stack(config.model, {kind: _slowest(of, parts, mesh, device) for kind, of in own.items()})


def _by_group(model: ModelConfig, profile: LayerProfile) -> LayerProfile:
    """Sum the recompute seconds of the tensors of each group of `skeletal_tensors`."""
    groups, found = {tensor.name: tensor.group for tensor in skeletal_tensors(model)}, dict[str, float]()
    for name, seconds in profile.recompute_s.items():
        found[groups[name]] = found.get(groups[name], 0.0) + seconds
    return dataclasses.replace(profile, recompute_s=found)


def one_of_each_kind(model: ModelConfig, layers: Iterable[int]) -> list[int]:
    """The first layer of each kind among the layers of a rank."""
    firsts: dict[ModelConfig, int] = {}
    for layer in layers:
        firsts.setdefault(stack_of(model)[layer], layer)
    return list(firsts.values())


def _of_stack(model: ModelConfig, found: Mapping[ModelConfig, LayerProfile]) -> LayerProfile:
    """The profile of the fastest kind of layer; `longer_s`: by how much the mean layer of the stack takes longer."""
    seconds = {kind: profile.forward_s + profile.backward_s for kind, profile in found.items()}
    least = min(found, key=seconds.__getitem__)
    mean_s = statistics.mean(seconds[kind] for kind in stack_of(model))
    return dataclasses.replace(found[least], longer_s=mean_s - seconds[least])


def tensor_bytes(config: RunConfig) -> dict[str, int]:
    """Bytes of each skeletal activation of one layer on one rank, by name; `config` is prepared."""
    dims = dataclasses.replace(slot_dims(config), tokens=rank_length(config))
    of_tokens = (tensor for tensor in skeletal_tensors(config.model) if tensor.layout != "carried")
    return {tensor.name: bytes_of(tensor, dims) for tensor in of_tokens}


def _cached_on_rank_0(profile_cache: str, key: ProfileKey, mesh: Mesh, device: torch.device) -> LayerProfile | None:
    """The profile in the cache of rank 0 if its key fits every rank, else None: nodes may have different devices."""

    def cached() -> LayerProfile | None:
        path = cache_file(profile_cache, key)
        try:
            return None if path is None or not path.exists() else LayerProfile.load(path)
        except ArtifactError as error:
            warn(f"the kept profile is not used, the layer is measured: {error}")
            return None

    found = from_rank_zero(cached, None if mesh.is_alone else mesh.world)
    fits = torch.tensor([int(found is not None and found.key == key)], device=device)
    return found if all_reduce(fits, mesh.world, "min").item() else None


def _slowest(own: LayerProfile, groups: Sequence[str], mesh: Mesh, device: torch.device) -> LayerProfile:
    """The slowest rank's times and the slowest link's rates. `groups`: all that a layer of the model may have."""
    recomputed = [own.recompute_s.get(group, 0.0) for group in groups]
    times = torch.tensor([own.forward_s, own.backward_s, *recomputed], dtype=torch.float64, device=device)
    rates = torch.tensor([getattr(own, name) for name in RATES], dtype=torch.float64, device=device)
    forward_s, backward_s, *recompute_s = all_reduce(times, mesh.world, "max").tolist()
    rates = all_reduce(rates, mesh.world, "min")
    return dataclasses.replace(
        own,
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s={group: seconds for group, seconds in zip(groups, recompute_s, strict=True) if seconds},
        **dict(zip(RATES, rates.tolist(), strict=True)),
    )


RATES = (
    "offload_bytes_per_s",
    "prefetch_bytes_per_s",
    "offload_under_compute_bytes_per_s",
    "prefetch_under_compute_bytes_per_s",
)
