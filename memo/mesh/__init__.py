"""Rank grid with named axes, and the process groups cut from it."""

from memo.config.grid import AXES, Coordinates, RankGrid
from memo.mesh.group import AxisGroup, Watch
from memo.mesh.mesh import Mesh, World, init_distributed, local_device, refusals_are_heard

__all__ = [
    "AXES",
    "AxisGroup",
    "Coordinates",
    "Mesh",
    "RankGrid",
    "Watch",
    "World",
    "init_distributed",
    "local_device",
    "refusals_are_heard",
]
