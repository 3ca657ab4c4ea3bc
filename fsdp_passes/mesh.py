"""The dimensions of a mesh: parameters are sharded over the last one; along the one before it, ranks are replicas.

On a mesh of one dimension there are no replicas. On one of two, (replicas, shards), the ranks of a row hold one copy of
the model together, and the ranks of a column hold equal shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

# Behind a group's name: the group that carries reduce-scatters when they have a communication stream of their own. It
# exists from the first execution on; whatever is asked of it while compiling, the first group answers.
REDUCE_GROUP_SUFFIX = ":reduce"


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks among which parameters are sharded, this one included."""
    return mesh.get_group(mesh.ndim - 1)


def num_shards(mesh: DeviceMesh) -> int:
    """Ranks in `shard_group`."""
    return mesh.size(mesh.ndim - 1)


def shard_index(mesh: DeviceMesh) -> int:
    """This rank's place in `shard_group`."""
    return mesh.get_local_rank(mesh.ndim - 1)


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that hold the same shards as this one; None where there is no other."""
    return mesh.get_group(0) if num_replicas(mesh) > 1 else None


def num_replicas(mesh: DeviceMesh) -> int:
    """Copies of the model."""
    return mesh.size(0) if mesh.ndim > 1 else 1


_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def shard_subgroup(mesh: DeviceMesh, size: int) -> dist.ProcessGroup:
    """This rank and its neighbours in `shard_group`, `size` ranks; `size` divides the group. Made at the first call,
    which every rank makes."""
    group = shard_group(mesh)
    made = _subgroups.setdefault(group, {})
    if size not in made:
        ranks, first = dist.get_process_group_ranks(group), shard_index(mesh) // size * size
        new: Any = dist.new_group(  # its type has a number in it, for ranks outside of the group
            ranks[first : first + size], use_local_synchronization=True, group_desc="fsdp_reshard"
        )
        made[size] = new
    return made[size]


def placements_on(mesh: DeviceMesh, placement: Placement) -> list[Placement]:
    """`placement` on the dimension of the shards, and equal on all replicas."""
    return [*[Replicate()] * (mesh.ndim - 1), placement]


def send_to_replicas(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Overwrite `tensors` with those of the first replica. Every rank of the mesh calls it with as many tensors of the
    same shapes; meta tensors have nothing to send. Those that are not on the mesh's devices travel one by one, through
    a copy there: the group need not have a backend for others."""
    group = replica_group(mesh)
    if group is None:
        return
    works = []
    for tensor in tensors:
        if tensor.device.type == mesh.device_type:
            works.append(dist.broadcast(tensor, group=group, group_src=0, async_op=True))
        elif tensor.device.type != "meta":
            copy = tensor.to(mesh.device_type)
            dist.broadcast(copy, group=group, group_src=0)
            tensor.copy_(copy)
    for work in works:
        assert work is not None
        work.wait()
