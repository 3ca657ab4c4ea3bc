"""Collectives without compute: the other floor of a step's time, and what the check of values needs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bench.models import Shape
from fsdp_passes._torch_compat import all_gather_coalesced, reduce_scatter_coalesced
from fsdp_passes.collectives import all_gather, reduce_scatter
from fsdp_passes.division import group_averages


class Collectives:
    """Single collectives on one group; averages where the backend cannot by scaling the sum."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self.averages = group_averages(self.group.group_name, torch.device(mesh.device_type))

    def own_rows(self, whole: Tensor) -> Tensor:
        """This rank's part of the rows; a view."""
        return whole.detach().chunk(self.world_size)[self.rank]

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, in order of rank."""
        whole = rows.new_empty((rows.shape[0] * self.world_size, *rows.shape[1:]))
        all_gather_coalesced([whole], [rows.contiguous()], self.group).wait()
        return whole

    def mean_of_own_rows(self, whole: Tensor) -> Tensor:
        """The mean over the ranks of this rank's part of the rows."""
        rows = whole.new_empty((whole.shape[0] // self.world_size, *whole.shape[1:]))
        reduce_scatter_coalesced([rows], [whole.contiguous()], self.group, average=self.averages).wait()
        return rows if self.averages else rows.mul_(1.0 / self.world_size)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks of a tensor of any shape."""
        rows = self.mean_of_own_rows(value.reshape(1, -1).expand(self.world_size, -1).contiguous())
        return rows.reshape(value.shape)


def parameters_by_unit(model: nn.Module) -> list[list[nn.Parameter]]:
    """The root's own parameters, then those of each layer: the units of every system that is measured."""
    layers = [list(layer.parameters()) for layer in model.layers]  # type: ignore[union-attr]
    inside = {param for layer in layers for param in layer}
    root = [param for param in model.parameters() if param not in inside]
    return [unit for unit in (root, *layers) if unit]


# What starts an all-gather, and what starts a reduce-scatter.
Starts = tuple[Callable[..., dist.Work], Callable[..., dist.Work]]
BACKENDS_OWN: Starts = (all_gather_coalesced, reduce_scatter_coalesced)
OURS: Starts = (all_gather, reduce_scatter)


class CommunicationAlone:
    """The collectives of one step, one grouped collective for each unit, one after another.

    As in the systems: every unit is gathered in the forward; in the backward every unit but the root is gathered again;
    every unit's gradients are reduced.
    """

    def __init__(
        self, shape: Shape, mesh: DeviceMesh, device: torch.device, reduce_dtype: torch.dtype, *, starts: Starts
    ) -> None:
        self.start_gather, self.start_reduce = starts
        with torch.device("meta"):
            units = parameters_by_unit(shape.make(torch.device("meta")))
        self.group = mesh.get_group()
        self.averages = group_averages(self.group.group_name, torch.device(mesh.device_type))
        has_root = len(units) > shape.layers
        self.unit_shapes = [[tuple(param.shape) for param in unit] for unit in units]
        self.regathered = self.unit_shapes[1:] if has_root else self.unit_shapes
        self.buffers: dict[tuple[object, ...], tuple[list[Tensor], ...]] = {}
        for shapes in self.unit_shapes:
            if tuple(shapes) not in self.buffers:  # layers of the same shapes use the same memory
                self.buffers[tuple(shapes)] = _buffers(shapes, mesh.size(), shape.compute_dtype, reduce_dtype, device)

    def step(self, batch: object) -> None:
        works = [self._gather(shapes) for shapes in self.unit_shapes]
        works += [self._gather(shapes) for shapes in reversed(self.regathered)]
        works += [self._reduce(shapes) for shapes in reversed(self.unit_shapes)]
        for work in works:
            work.wait()

    def _gather(self, shapes: list[tuple[int, ...]]) -> dist.Work:
        shards, wholes, _, _ = self.buffers[tuple(shapes)]
        return self.start_gather(wholes, shards, self.group)

    def _reduce(self, shapes: list[tuple[int, ...]]) -> dist.Work:
        _, _, grads, rows = self.buffers[tuple(shapes)]
        return self.start_reduce(rows, grads, self.group, average=self.averages)


def _buffers(
    shapes: list[tuple[int, ...]],
    world_size: int,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[Tensor], ...]:
    """Shards, whole parameters, whole gradients, this rank's rows of them; random where they are sent."""
    parts = [(size[0] // world_size, *size[1:]) for size in shapes]
    return (
        [torch.randn(size, device=device, dtype=param_dtype) for size in parts],
        [torch.empty(size, device=device, dtype=param_dtype) for size in shapes],
        [torch.randn(size, device=device, dtype=reduce_dtype) for size in shapes],
        [torch.empty(size, device=device, dtype=reduce_dtype) for size in parts],
    )
