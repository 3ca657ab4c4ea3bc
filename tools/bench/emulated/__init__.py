"""Several ranks emulated in one process: real values in real buffers, modelled time."""

from bench.emulated.group import BACKEND, EmulatedGroup, init_emulated_group
from bench.emulated.link import LinkModel

__all__ = ["BACKEND", "EmulatedGroup", "LinkModel", "init_emulated_group"]
