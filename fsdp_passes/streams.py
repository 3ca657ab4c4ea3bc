"""The CUDA streams of a context, each made at its first use: wrapping a model must not initialize CUDA."""

from __future__ import annotations

import contextlib
import enum
from typing import Any

import torch


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
