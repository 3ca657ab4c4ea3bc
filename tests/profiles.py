"""Profiles of CPU ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from fsdp_passes.context import FsdpContext
from fsdp_passes.errors import CollectiveError
from fsdp_passes.gathering import finish_gather


@contextlib.contextmanager
def cpu_profile() -> Iterator[torch.profiler.profile]:
    """`torch.profiler` on the CPU, stopped only when no collective is in flight.

    PyTorch's profiler frees its events when it stops, and a gloo collective that ends later writes its end time into
    that memory: see docs/inspecting.md. A forward alone may end with the backward's first gather on its way.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        try:
            yield profiler
        finally:
            wait_for_communication()


def wait_for_communication() -> None:
    """Wait for every gather that any model of this process has started ahead of its use."""
    for context in [found for found in gc.get_objects() if type(found) is FsdpContext]:
        for unit in context.units:
            with contextlib.suppress(CollectiveError):  # of a group that has failed: it is over
                finish_gather(unit)
        for started in context.lookahead.started.values():
            started.work.wait()
