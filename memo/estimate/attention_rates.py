"""The rate of attention under the kernels that a run asks for; a machine has that of the quickest that torch has."""

from dataclasses import replace

from memo.config import RunConfig
from memo.config.attention_kernels import FLASH_2, flash_2_times
from memo.estimate.hardware import Hardware


def with_attention_of(hardware: Hardware, config: RunConfig) -> Hardware:
    """The machine as `config` uses it: under FlashAttention 2, attention of some GPUs takes several times as long."""
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
    """Whether attention runs by FlashAttention 2 on a GPU for which others are quicker."""
    return _times(hardware, config) > 1


def _times(hardware: Hardware, config: RunConfig) -> float:
    """--deterministic chooses FlashAttention 2 where --attention-backend is auto."""
    backend = config.hardware.attention_backend
    is_flash_2 = backend in FLASH_2 or (backend == "auto" and config.hardware.deterministic)
    return flash_2_times(hardware.capability) if is_flash_2 else 1.0
