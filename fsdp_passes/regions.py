"""NVTX regions: how a unit's name travels to run time, and the ranges that are opened with it.

A compiled graph may serve many units (one artifact for all layers of a model), so a label must not be a constant of the
graph. It travels as data: a small CPU tensor that holds the text and is a graph input.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.autograd.profiler import record_function

from fsdp_passes._torch_compat import is_in_backward, is_profiler_enabled

LABEL_BYTES = 256  # fixed, so that units with longer and shorter names share one compiled graph

FORWARD_COMPUTE = "forward_compute"
BACKWARD_COMPUTE = "backward_compute"


def region_name(unit: str, phase: str) -> str:
    """`FSDP:<unit>:<phase>`, the one format of both ways of running."""
    return f"FSDP:{unit}:{phase}"


def encode_label(text: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Write `text` as UTF-8 into a uint8 CPU tensor of shape (LABEL_BYTES,), zero-padded; long names keep their end."""
    data = text.encode()[-LABEL_BYTES:]
    tensor = torch.zeros(LABEL_BYTES, dtype=torch.uint8) if out is None else out
    tensor.zero_()
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor


@functools.lru_cache(maxsize=4096)
def _decode(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


def decode_label(label: torch.Tensor) -> str:
    """The text in a tensor made by `encode_label`."""
    return _decode(bytes(label.tolist()))


class _OpenRegions(threading.local):
    """Ranges opened and not yet closed on this thread; autograd runs backwards on threads of its own."""

    def __init__(self) -> None:
        self.stack: list[Any] = []  # (the profiler's range or None, has an NVTX range, was opened in a backward)


_open = _OpenRegions()


def push_region(name: str) -> None:
    """Open a range for NVTX (when CUDA is in use) and for torch.profiler (when one is recording)."""
    recorder = None
    if is_profiler_enabled():
        recorder = record_function(name)
        recorder.__enter__()
    if torch.cuda.is_initialized():
        torch.cuda.nvtx.range_push(name)
        _open.stack.append((recorder, True, is_in_backward()))
    else:
        _open.stack.append((recorder, False, is_in_backward()))


def pop_region() -> None:
    """Close the range that was opened last on this thread; nothing when none is open."""
    if not _open.stack:
        return
    recorder, has_nvtx, _ = _open.stack.pop()
    if has_nvtx:
        torch.cuda.nvtx.range_pop()
    if recorder is not None:
        recorder.__exit__(None, None, None)


def num_open_regions() -> int:
    """How many ranges are open on this thread."""
    return len(_open.stack)


def close_regions_above(depth: int) -> None:
    """Close what an exception left open: afterwards `depth` ranges are open on this thread."""
    while len(_open.stack) > depth:
        pop_region()


def close_backward_regions() -> None:
    """Close what a backward that raised left open; called where no backward is running on this thread."""
    while _open.stack and _open.stack[-1][2]:
        pop_region()
