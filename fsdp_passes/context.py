"""FsdpContext: what a root and all units nested in it share."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_passes._torch_compat import register_group_alias
from fsdp_passes.unit import FsdpUnit

# Behind a group's name: the group that carries reduce-scatters when they have a communication stream of their own.
REDUCE_GROUP_SUFFIX = ":reduce"

_reduce_groups: dict[str, dist.ProcessGroup] = {}


class FsdpContext:
    """Shared by a root and all units nested in it, and by both ways of running.

    Attributes:
        units: every unit, outermost last, in the order in which they were sharded.
    """

    def __init__(self) -> None:
        self.units: list[FsdpUnit] = []

    def adopt(self, other: FsdpContext) -> None:
        """Take over the units of a context whose root is nested in ours."""
        for unit in other.units:
            unit.context = self
        self.units.extend(other.units)
        other.units = []


def ensure_reduce_group(mesh: DeviceMesh) -> None:
    """Create the second group of `unify_communication_stream=False`, once per mesh.

    Creating a group waits for the other ranks, so this is called at the first execution of a graph and never while
    compiling: ranks may compile at different times, but they all reach the first execution.
    """
    group = mesh.get_group()
    name = group.group_name + REDUCE_GROUP_SUFFIX
    if name in _reduce_groups:
        return
    ranks = dist.get_process_group_ranks(group)
    second = dist.new_group(ranks, use_local_synchronization=True, group_desc="fsdp_reduce")
    register_group_alias(name, second)
    _reduce_groups[name] = second
