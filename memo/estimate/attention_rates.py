"""The rate of attention under the kernels that a run asks for; a machine has that of the quickest that torch has."""

from dataclasses import replace

from memo.config import RunConfig
from memo.config.attention_kernels import FIRST_BEYOND_FLASH_2, FLASH_2, FLASH_2_TIMES
from memo.estimate.hardware import Hardware


def with_attention_of(hardware: Hardware, config: RunConfig) -> Hardware:
    """The machine as `config` uses it: under FlashAttention 2, attention of later GPUs takes FLASH_2_TIMES as long.

    --deterministic chooses it where --attention-backend is auto.
    """
    backend = config.hardware.attention_backend
    slow = backend in FLASH_2 or (backend == "auto" and config.hardware.deterministic)
    if not slow or hardware.capability < FIRST_BEYOND_FLASH_2:
        return hardware
    efficiency = hardware.efficiency
    slower = replace(
        efficiency,
        attention_forward=efficiency.attention_forward / FLASH_2_TIMES,
        attention_backward=efficiency.attention_backward / FLASH_2_TIMES,
    )
    return replace(hardware, efficiency=slower)
