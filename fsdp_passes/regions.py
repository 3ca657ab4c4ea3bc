"""NVTX regions: how a unit's identity travels to run time, and the ranges that are opened with its name.

A compiled graph may serve many units (one artifact for all layers of a model), so a label must not be a constant of the
graph. It travels as data: a CPU tensor that holds a number and is a graph input.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Protocol

import torch
from torch.autograd.profiler import record_function

from fsdp_passes._torch_compat import is_in_backward, is_profiler_enabled

FORWARD_COMPUTE = "forward_compute"
BACKWARD_COMPUTE = "backward_compute"
ALL_GATHER_REGION = "all_gather"
REDUCE_SCATTER_REGION = "reduce_scatter"
ALL_REDUCE_REGION = "all_reduce"


def region_name(unit: str, phase: str) -> str:
    """`FSDP:<unit>:<phase>`, the one format of both ways of running."""
    return f"FSDP:{unit}:{phase}"


class HasDisplayName(Protocol):
    """What a label can stand for."""

    @property
    def display_name(self) -> str: ...


# Numbers are never used twice in a process, and a label keeps nothing alive.
_numbers = itertools.count(1)
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_label(owner: HasDisplayName) -> torch.Tensor:
    """A label that stands for `owner`: an int64 CPU tensor of shape (1,)."""
    number = next(_numbers)
    _owners[number] = owner
    return torch.tensor([number], dtype=torch.int64)


def label_owner(label: torch.Tensor) -> Any | None:
    """What `label` was made for; None when that is gone, or when `label` was not made by `new_label`."""
    return _owners.get(int(label.item()))


def label_text(label: torch.Tensor) -> str:
    """The name of what `label` stands for, as it is now."""
    owner = label_owner(label)
    return "?" if owner is None else str(owner.display_name)


class _OpenRegions(threading.local):
    """Ranges opened and not yet closed on this thread; autograd runs backwards on threads of its own."""

    def __init__(self) -> None:
        # (the profiler's range or None, has an NVTX range, was opened in a backward, name, is shown)
        self.stack: list[Any] = []


_open = _OpenRegions()


def push_region(name: str, *, is_shown: bool = True) -> None:
    """Open a range for NVTX (when CUDA is in use) and for torch.profiler (when one is recording). Without `is_shown`
    only we know of it."""
    recorder = None
    if is_shown and is_profiler_enabled():
        recorder = record_function(name)
        recorder.__enter__()
    has_nvtx = is_shown and torch.cuda.is_initialized()
    if has_nvtx:
        torch.cuda.nvtx.range_push(name)
    _open.stack.append((recorder, has_nvtx, is_in_backward(), name, is_shown))


def pop_region() -> None:
    """Close the range that was opened last on this thread; nothing when none is open."""
    if not _open.stack:
        return
    recorder, has_nvtx, *_ = _open.stack.pop()
    if has_nvtx:
        torch.cuda.nvtx.range_pop()
    if recorder is not None:
        recorder.__exit__(None, None, None)


def num_open_regions() -> int:
    """How many ranges are open on this thread."""
    return len(_open.stack)


def innermost_region() -> str:
    """The name of the range that was opened last on this thread and is still open; "" when none is."""
    return str(_open.stack[-1][3]) if _open.stack else ""


def is_innermost_region_shown() -> bool:
    """Whether profilers may see the range that was opened last on this thread and is still open; True when none is."""
    return not _open.stack or bool(_open.stack[-1][4])


def close_regions_above(depth: int) -> None:
    """Close what an exception left open: afterwards `depth` ranges are open on this thread."""
    while len(_open.stack) > depth:
        pop_region()


def close_backward_regions() -> None:
    """Close what a backward that raised left open; called where no backward is running on this thread."""
    while _open.stack and _open.stack[-1][2]:
        pop_region()
