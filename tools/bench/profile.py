"""What a profile of one step says: exposed communication, compute, slow-down, kernels."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Span = tuple[float, float]

COMMUNICATION_PREFIXES = ("nccl", "emulated_collective")
# Parts of the names of matrix products and attention in cuBLAS, CUTLASS and cuDNN.
MATMUL_PARTS = ("gemm", "nvjet", "cutlass", "xmma", "flash", "fmha", "sdpa", "cudnn")


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """Times of the kernels of one step on one rank, in milliseconds.

    Attributes:
        exposed_ms: a collective's kernel runs and no other kernel does. With real NCCL such a kernel may be waiting for
            the other rank.
        communication_ms: collectives' kernels run, hidden or not.
        compute_ms: other kernels, copies and fills run: the length of their union.
        matmul_ms: sum over matrix products and attention, which grows when collectives hold multiprocessors.
        idle_ms: between the first and the last kernel, nothing runs.
        num_kernels: kernels, copies and fills aside.
        num_communication_kernels: of these, collectives.
    """

    exposed_ms: float
    communication_ms: float
    compute_ms: float
    matmul_ms: float
    idle_ms: float
    num_kernels: int
    num_communication_kernels: int


def union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order that cover the same time."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """How long both run; each is disjoint and in order."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def analyze(trace_events: Iterable[Mapping[str, Any]]) -> StepProfile:
    """Read the events of a Chrome trace of torch.profiler, whose times are in microseconds.

    Only the categories of things that run on the GPU count: the ranges of annotations, which are drawn on its rows too,
    have a category of their own.
    """
    communication: list[Span] = []
    compute: list[Span] = []
    matmul_us, num_kernels = 0.0, 0
    for event in trace_events:
        category = event.get("cat")
        if event.get("ph") != "X" or category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name = str(event["name"]).lower()
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        num_kernels += category == "kernel"
        if category == "kernel" and name.startswith(COMMUNICATION_PREFIXES):
            communication.append(span)
            continue
        compute.append(span)
        # Inductor names a fused kernel after all that it came from, the attention beside it included.
        if not name.startswith("triton_") and any(part in name for part in MATMUL_PARTS):
            matmul_us += span[1] - span[0]
    busy_communication, busy_compute = union(communication), union(compute)
    everything = union([*communication, *compute])
    whole_us = everything[-1][1] - everything[0][0] if everything else 0.0
    return StepProfile(
        exposed_ms=(length(busy_communication) - overlap(busy_communication, busy_compute)) / 1e3,
        communication_ms=length(busy_communication) / 1e3,
        compute_ms=length(busy_compute) / 1e3,
        matmul_ms=matmul_us / 1e3,
        idle_ms=(whole_us - length(everything)) / 1e3,
        num_kernels=num_kernels,
        num_communication_kernels=len(communication),
    )


def profile_step(step: Callable[[], object], keep_trace: str | None = None) -> StepProfile:
    """Run `step` once under the profiler on a GPU; with `keep_trace`, leave the trace in that file."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(keep_trace) if keep_trace else Path(folder) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        return analyze(json.loads(path.read_text())["traceEvents"])
