"""Hand-made Chrome traces, as torch.profiler writes them for a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

CPU, GPU = 100, 0  # process numbers of the CPU's and the GPU's rows
MAIN, AUTOGRAD = 1, 2  # threads
COMPUTE, COMMUNICATION = 7, 20  # streams
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class GpuTrace:
    """Events with times in microseconds."""

    def __init__(self, rank: int = 0, world_size: int = 2) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": CPU, "tid": 0, "args": {}}]
        self.metadata = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size}}
        self._next_correlation = 1

    def annotate(self, name: str, begin: float, end: float, thread: int = MAIN) -> None:
        self._add("user_annotation", name, begin, end, CPU, thread)

    def kernel(
        self,
        name: str,
        begin: float,
        end: float,
        *,
        launch: float | None,
        stream: int = COMPUTE,
        thread: int = MAIN,
        **arguments: Any,
    ) -> None:
        """A kernel and its launch; None: the launch is not in the trace, as for kernels of a CUDA graph."""
        number = self._next_correlation
        self._next_correlation += 1
        arguments = {"stream": stream, "correlation": number, **arguments}
        if launch is not None:
            self._add("cuda_runtime", "cudaLaunchKernel", launch, launch + 1, CPU, thread, correlation=number)
        self._add("kernel", name, begin, end, GPU, stream, **arguments)

    def collective(self, name: str, begin: float, end: float, *, launch: float | None, num_elements: int = 0) -> None:
        sizes = {"In msg nelems": num_elements // 2, "Out msg nelems": num_elements, "dtype": "BFloat16"}
        self.kernel(name, begin, end, launch=launch, stream=COMMUNICATION, **(sizes if num_elements else {}))

    def _add(self, category: str, name: str, begin: float, end: float, pid: int, tid: int, **arguments: Any) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "pid": pid, "tid": tid}
        self.events.append({**event, "args": arguments})

    def write(self, path: Path) -> Path:
        text = json.dumps({"schemaVersion": 1, **self.metadata, "traceEvents": self.events, "traceName": "t"}, indent=1)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path


def two_layers(rank: int = 0, late_us: float = 0.0) -> GpuTrace:
    """One forward and backward of a root with one layer under FSDP2, on a GPU that runs behind its CPU.

    stream 7:                [copy out 1040-1050][root mm 1050-1150]      [layer mm 1200-1400] [layer bwd 1500-1700]
    stream 20: AG root 1000-1040      AG layer 1060-1200                         RS layer 1710-1810

    `late_us`: the rank comes that much later to the reduce-scatter, which then ends at the same time.
    """
    trace = GpuTrace(rank)
    trace.annotate("ProfilerStep#3", 0, 500)
    trace.annotate("FSDP::root_pre_forward", 1, 2)
    trace.annotate("FSDP::pre_forward", 3, 30)
    trace.annotate("FSDP::all_gather", 4, 15)
    trace.collective(ALL_GATHER, 1000, 1040, launch=5, num_elements=4096)
    trace.annotate("FSDP::all_gather_copy_out", 16, 29)
    trace.kernel("split_with_sizes_copy", 1040, 1050, launch=17)
    trace.kernel("gemm", 1050, 1150, launch=35)  # behind the root's hook: the root computes
    trace.annotate("FSDP::pre_forward (layers.0)", 40, 60)
    trace.annotate("FSDP::all_gather (layers.0)", 41, 50)
    trace.collective(ALL_GATHER, 1060, 1200, launch=42, num_elements=8192)
    trace.kernel("gemm", 1200, 1400, launch=65)
    trace.annotate("FSDP::post_forward (layers.0)", 70, 75)
    trace.annotate("FSDP::post_forward", 80, 81)
    trace.annotate("FSDP::pre_backward (layers.0)", 100, 110, thread=AUTOGRAD)
    trace.kernel("gemm_backward", 1500, 1700, launch=115, thread=AUTOGRAD)
    trace.annotate("FSDP::post_backward_reduce (layers.0)", 130, 150, thread=AUTOGRAD)
    trace.kernel("chunk_cat", 1700, 1710, launch=131, thread=AUTOGRAD)
    trace.kernel(
        REDUCE_SCATTER, 1710 + late_us, 1810, launch=135, stream=COMMUNICATION, thread=AUTOGRAD,
        **{"In msg nelems": 8192, "Out msg nelems": 4096, "dtype": "Float"},
    )  # fmt: skip
    return trace
