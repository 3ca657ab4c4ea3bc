"""The CUDA streams of a context, each made at its first use: wrapping a model must not initialize CUDA."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import warnings
from typing import Any

import torch

from fsdp_passes.errors import OneQueueWarning


@functools.cache  # once in a process
def warn_of_one_queue(device_type: str) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1 takes the overlap away, and nothing else tells: losses are right, steps slow."""
    if device_type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS: expected it to be unset, or 2 or more, found 1. All streams of a GPU share "
            "one hardware queue then: a collective that was launched behind a kernel starts behind it, whatever stream "
            "it is on, and compute does not hide it. Unset it before the process starts; scripts for tensor "
            "parallelism often set it.",
            OneQueueWarning,
            stacklevel=3,
        )


class Purpose(enum.Enum):
    """What runs on a stream beside the compute."""

    # All-gathers and reduce-scatters, serialized, so that their temporary buffers belong to one stream of the caching
    # allocator and each can reuse what another released; and copies of shards to the device, ahead of their gather.
    COMMUNICATION = "communication"
    # All-reduces over replicas, whose network is another one as a rule: they run beside the others.
    REPLICAS = "replicas"
    # Casts of shards in compiled code. The fallback casts on the communication stream, which waits for its gathers.
    CASTS = "casts"


class Streams:
    """One stream for each purpose and device: a model that has moved never gets a stream of where it was."""

    def __init__(self) -> None:
        self._streams: dict[tuple[Purpose, torch.device], torch.cuda.Stream] = {}

    def get(self, purpose: Purpose, device: torch.device) -> torch.cuda.Stream | None:
        """None on the CPU (gloo runs on threads of its own)."""
        if device.type != "cuda":
            return None
        stream = self._streams.get((purpose, device))
        if stream is None:
            stream = self._streams[purpose, device] = torch.cuda.Stream(device, priority=-1)
        return stream

    def on(self, purpose: Purpose, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Allocate and run on the stream; does nothing on the CPU."""
        stream = self.get(purpose, device)
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
