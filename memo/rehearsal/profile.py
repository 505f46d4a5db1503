"""The layer profile of a run on the emulated GPU, by which --offload-alpha auto decides.

The emulated GPU does not have the times of a GPU, so the layer is not timed there. Its times come from --layer-profile,
measured on the real device, or else from the cost model.
"""

import dataclasses
import datetime

import torch

from memo.artifacts.layer_profile import LayerProfile, ProfileKey
from memo.config import RunConfig
from memo.errors import ConfigError
from memo.estimate.hardware import Hardware
from memo.simulate.kernels import Kernels
from memo.simulate.layer import swapped_layer
from memo.simulate.swapping import modelled_problem
from memo.train.layer_profile import profile_key, tensor_bytes

_OF_THE_PLACE = ("device", "num_threads", "ranks_per_node", "torch", "memo")
"""Fields of a profile's key that depend on the machine of the measurement, not on the layer."""


def layer_profile(
    config: RunConfig, world_size: int, hardware: Hardware, device: torch.device, given: str | None
) -> LayerProfile:
    """The profile with the key of this process. `config` is prepared without --layer-profile; `given` is its value.

    Raises ArtifactError if the file is no profile, ConfigError if it is the profile of another layer.
    """
    key = profile_key(config, device)
    if given is None:
        return _modelled(config, world_size, hardware, key)
    profile = LayerProfile.load(given)
    place = {name: getattr(key, name) for name in _OF_THE_PLACE}
    differences = dataclasses.replace(profile.key, **place).differences(key)
    if differences:
        raise ConfigError(
            f"--layer-profile {given} was not measured for this run: {differences}: give one of the same layer, or "
            "leave it out, and the cost model foresees the times"
        )
    return dataclasses.replace(profile, key=key)


def _modelled(config: RunConfig, world_size: int, hardware: Hardware, key: ProfileKey) -> LayerProfile:
    dtype = config.training.params_dtype
    assert dtype is not None, "prepare() resolves the dtype"
    layer = swapped_layer(config, Kernels(hardware, dtype))
    # A profile is of a whole layer, even if a slot holds only a section.
    whole = dataclasses.replace(config, memory=dataclasses.replace(config.memory, offload_granularity="layer"))
    problem = modelled_problem(whole, world_size, hardware, layer)
    offload, prefetch = problem.offload, problem.prefetch
    assert offload.alone_bytes_per_s and prefetch.alone_bytes_per_s, "a machine has the rates of its links"
    return LayerProfile(
        key=key,
        measured_at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        tensor_bytes=tensor_bytes(config),
        forward_s=problem.forward_s,
        backward_s=problem.backward_s,
        longer_s=problem.longer_s,
        recompute_s={name: cost.total_s for name, cost in layer.recompute.items()},
        offload_bytes_per_s=offload.alone_bytes_per_s,
        prefetch_bytes_per_s=prefetch.alone_bytes_per_s,
        offload_under_compute_bytes_per_s=offload.under_compute_bytes_per_s or 0.0,
        prefetch_under_compute_bytes_per_s=prefetch.under_compute_bytes_per_s or 0.0,
    )
