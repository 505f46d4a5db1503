"""The machines that memo knows by name."""

from memo.estimate.hardware import Hardware
from memo.estimate.hardware_cards import CARDS
from memo.estimate.hardware_sxm import A100_40, A100_80, A800_80, B200, CPU, H100_80, H100_94, H200

HARDWARE: dict[str, Hardware] = {
    machine.name: machine for machine in (A100_40, A100_80, A800_80, H100_80, H100_94, H200, B200, *CARDS, CPU)
}
