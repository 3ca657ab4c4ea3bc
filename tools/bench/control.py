"""What the ranks of a measurement tell each other beside the collectives that are measured."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Control:
    """Over gloo on the host, so that nothing of it runs on the GPU; of one process, nothing at all."""

    def __init__(self, is_alone: bool) -> None:
        self._group = None if is_alone else dist.new_group(backend="gloo")
        self.rank = 0 if is_alone else dist.get_rank()

    def barrier(self) -> None:
        """Every rank comes here before any goes on. (gloo's own barrier needs several round trips more.)"""
        if self._group is not None:
            dist.all_reduce(torch.zeros(1), group=self._group)

    def all_of(self, value: Any) -> list[Any]:
        """The value of each rank, in order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def agreed(self, value: bool) -> bool:
        """Rank 0's answer on every rank: decisions that depend on a clock must not differ."""
        return bool(self.all_of(value)[0])
