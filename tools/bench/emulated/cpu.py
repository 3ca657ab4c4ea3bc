"""The emulated link on the CPU: values at once, time by sleeping. For tests, and to try a tool without a GPU."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import Tensor


class CpuWork(dist.Work):
    """Done at `done_s` (of `time.monotonic`); the values are there already."""

    def __init__(self, done_s: float) -> None:
        super().__init__()
        self.done_s = done_s

    def wait(self, timeout: object = None) -> bool:
        time.sleep(max(0.0, self.done_s - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        return time.monotonic() >= self.done_s


class CpuLink:
    """One link: a collective begins when the one before it is done."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._free_s = 0.0
        # torch.distributed's C++ side holds a work without its Python part, whose `wait` would be lost with it.
        self._works: list[CpuWork] = []

    def _work(self, duration_us: float, is_async: bool) -> CpuWork:
        self._free_s = max(self._free_s, time.monotonic()) + duration_us * 1e-6
        work = CpuWork(self._free_s)
        self._works = [other for other in self._works if not other.is_completed()] + [work]
        if not is_async:
            work.wait()
        return work

    def all_gather(self, pairs: list[tuple[Tensor, Tensor]], duration_us: float, is_async: bool) -> CpuWork:
        for output, value in pairs:
            output.view(self.world_size, -1).copy_(value.reshape(1, -1).expand(self.world_size, -1))
        return self._work(duration_us, is_async)

    def reduce_scatter(
        self, pairs: list[tuple[Tensor, Tensor]], scale: float, duration_us: float, is_async: bool
    ) -> CpuWork:
        for output, value in pairs:
            output.view(-1).copy_(value.reshape(self.world_size, -1)[self.rank])
            if scale != 1:
                output.mul_(scale)
        return self._work(duration_us, is_async)

    def scale(self, tensors: list[Tensor], scale: float, duration_us: float, is_async: bool) -> CpuWork:
        for tensor in tensors:
            if scale != 1:
                tensor.mul_(scale)
        return self._work(duration_us, is_async)
