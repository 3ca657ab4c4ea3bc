"""Which part of a parameter a rank holds, and how parts and the whole turn into each other."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fsdp_passes._torch_compat import dtensor_of, join_meshes, strided_shard
from fsdp_passes.mesh import placements_on


def part_of(whole: Tensor, world_size: int, index: int, dim: int = 0) -> Tensor:
    """A copy of what rank `index` of `world_size` holds of `whole` along `dim`: contiguous, and padded with zeros to as
    much on every rank."""
    size = -(-whole.shape[dim] // world_size)
    first = min(index * size, whole.shape[dim])
    part = whole.narrow(dim, first, min(size, whole.shape[dim] - first))
    padded = whole.new_zeros((*whole.shape[:dim], size, *whole.shape[dim + 1 :]))
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    return padded


def whole_from_gathered(gathered: Tensor, world_size: int, shard_dim: int) -> Tensor:
    """What an all-gather of parts along `shard_dim` made, shape (world_size * n0, …, part, …), as the whole tensor
    (n0, …, world_size * part, …). For dimension 0 `gathered` itself, else a copy."""
    if shard_dim == 0:
        return gathered
    parts = gathered.unflatten(0, (world_size, -1)).movedim(0, shard_dim)
    return parts.flatten(shard_dim, shard_dim + 1)


def scattered_from_whole(whole: Tensor, world_size: int, shard_dim: int) -> Tensor:
    """The inverse of `whole_from_gathered`: the parts of all ranks, one behind the other."""
    if shard_dim == 0:
        return whole
    return whole.unflatten(shard_dim, (world_size, -1)).movedim(shard_dim, 0).flatten(0, 1)


class TensorParallel(NamedTuple):
    """How a parameter was distributed before it was sharded: each rank of `mesh` holds a part of it, which is sharded
    over the ranks that hold the same part.

    Attributes:
        mesh, placements: of the DTensor that the parameter was.
        shape, stride: of the whole parameter.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: Tensor) -> TensorParallel | None:
        """None for a plain tensor."""
        if not isinstance(param, DTensor):
            return None
        return cls(param.device_mesh, tuple(param.placements), param.shape, param.stride())

    def num_parts(self, dim: int) -> int:
        """In how many parts dimension `dim` was split."""
        return math.prod(
            size
            for size, placement in zip(self.mesh.shape, self.placements, strict=True)
            if isinstance(placement, Shard) and placement.dim == dim
        )

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor that the module's code computes with; autograd goes through it."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def sharded_dtensor(
    local: Tensor, shape: torch.Size, mesh: DeviceMesh, shard_dim: int, tensor_parallel: TensorParallel | None
) -> DTensor:
    """The DTensor of a rank's part: sharded along `shard_dim` over the last dimension of `mesh`; over the dimension of
    tensor parallelism it is as it was.

    `shape`: of the tensor that is sharded. With tensor parallelism that is a part, which was cut first: its own shards
    lie strided in the whole.
    """
    placement: Placement = Shard(shard_dim)
    placements = placements_on(mesh, placement)
    stride = torch.empty(shape, device="meta").stride()  # of the whole, contiguous tensor: it says nothing about a part
    if tensor_parallel is not None:
        num_parts = tensor_parallel.num_parts(shard_dim)
        if num_parts > 1:
            placements = placements_on(mesh, strided_shard(shard_dim, num_parts))
        placements = [*placements, *tensor_parallel.placements]
        mesh = join_meshes(mesh, tensor_parallel.mesh)
        shape, stride = tensor_parallel.shape, tensor_parallel.stride
    return dtensor_of(local, mesh, placements, shape, stride)
