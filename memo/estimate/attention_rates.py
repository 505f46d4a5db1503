"""The kernels of attention that are foreseen on a machine, and their rate; a machine states that of torch's fastest."""

from dataclasses import replace

from memo.config import ModelConfig, RunConfig
from memo.config.attention_kernels import FLASH_2, backend_by_capability, flash_2_times
from memo.config.require import require
from memo.config.run import HardwareConfig, KernelSet
from memo.estimate.hardware import Hardware


def device_of(hardware: Hardware, model: ModelConfig, deterministic: bool, kernels: KernelSet) -> HardwareConfig:
    """Return the device, with the kernels that --attention-backend auto chooses for it. Raises ConfigError for a CPU
    with Triton's kernels."""
    if hardware.device == "cpu":
        require(
            kernels == "torch", f"--kernels {kernels} needs a GPU, but {hardware.name} is a CPU: use --kernels torch"
        )
        return HardwareConfig(device="cpu", deterministic=deterministic, kernels=kernels)
    backend = backend_by_capability(hardware.capability, deterministic, model.attn_logit_softcapping > 0)
    return HardwareConfig(device="cuda", attention_backend=backend, deterministic=deterministic, kernels=kernels)


def with_attention_of(hardware: Hardware, config: RunConfig) -> Hardware:
    """The machine as `config` uses it: with FlashAttention 2, attention takes several times as long on some GPUs."""
    times = _times(hardware, config)
    if times == 1:
        return hardware
    efficiency = hardware.efficiency
    slower = replace(
        efficiency,
        attention_forward=efficiency.attention_forward / times,
        attention_backward=efficiency.attention_backward / times,
    )
    return replace(hardware, efficiency=slower)


def has_slow_attention(hardware: Hardware, config: RunConfig) -> bool:
    """Whether attention runs by FlashAttention 2 on a GPU for which other kernels are faster."""
    return _times(hardware, config) > 1


def _times(hardware: Hardware, config: RunConfig) -> float:
    """How many times as long attention takes. --deterministic chooses FlashAttention 2 if --attention-backend is
    auto."""
    backend = config.hardware.attention_backend
    is_flash_2 = backend in FLASH_2 or (backend == "auto" and config.hardware.deterministic)
    return flash_2_times(hardware.capability) if is_flash_2 else 1.0
