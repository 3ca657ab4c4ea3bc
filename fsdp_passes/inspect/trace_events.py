"""What is kept of a trace: times and names in flat arrays, about a tenth of the file's size at most."""

from __future__ import annotations

import dataclasses
from array import array
from bisect import bisect_left
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from fsdp_passes.errors import TraceFileError
from fsdp_passes.inspect.json_stream import read_trace
from fsdp_passes.inspect.trace_names import is_collective_kernel, is_collective_op, is_cpu_work, num_bytes_of

_GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCH_CATEGORIES = {"cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime"}
_NO_CORRELATION = -1


class Names:
    """Texts or other keys as small numbers."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._index: dict[Hashable, int] = {}

    def index(self, key: Hashable) -> int:
        found = self._index.get(key)
        if found is None:
            found = self._index[key] = len(self.all)
            self.all.append(key)
        return found


class Table:
    """Intervals with a name and a lane (a thread or a stream) each; times in microseconds."""

    def __init__(self) -> None:
        self.begins = array("d")
        self.ends = array("d")
        self.names = array("i")
        self.lanes = array("i")

    def append(self, begin: float, end: float, name: int, lane: int) -> None:
        self.begins.append(begin)
        self.ends.append(end)
        self.names.append(name)
        self.lanes.append(lane)

    def __len__(self) -> int:
        return len(self.begins)

    def in_order(self) -> list[int]:
        """Indices by begin; of two that begin together, the longer first."""
        order = sorted(range(len(self)), key=self.ends.__getitem__, reverse=True)
        order.sort(key=self.begins.__getitem__)
        return order


class Launches:
    """The CPU's calls that launched work on the GPU, to be found by their correlation number."""

    def __init__(self) -> None:
        self._correlations = array("q")
        self._times = array("d")
        self._lanes = array("i")
        self._order = array("i")

    def append(self, correlation: int, time: float, lane: int) -> None:
        self._correlations.append(correlation)
        self._times.append(time)
        self._lanes.append(lane)

    def find(self, correlation: int) -> tuple[int, float] | None:
        """(thread, time) of the call, None when the trace does not have it."""
        if len(self._order) != len(self._correlations):
            self._order = array("i", sorted(range(len(self._correlations)), key=self._correlations.__getitem__))
        at = bisect_left(self._order, correlation, key=self._correlations.__getitem__)
        if at == len(self._order) or self._correlations[self._order[at]] != correlation:
            return None
        return self._lanes[self._order[at]], self._times[self._order[at]]


@dataclasses.dataclass
class TraceEvents:
    """One rank's trace.

    Attributes:
        names, lanes: what the numbers in the tables stand for; a lane is (process, thread or stream).
        gpu: kernels, copies and fills; `correlations` has one number for each, -1 where none is known.
        launches: the calls that started them.
        annotations: of the CPU (record_function); `gpu_annotations` the same as the GPU saw them.
        collective_calls: CPU operators that start a collective or wait for one; `work` those that compute.
            Both are left empty for work on a GPU, where the CPU's time says nothing.
        last_work: lane -> the (begin, end) that was added last to `work`.
        region_calls: the calls with which compiled code opens this library's regions.
        collective_names: index in `gpu` -> what PyTorch calls a collective whose kernel's name does not tell.
        message_bytes: index in `gpu` or `collective_calls` -> bytes, where the profiler noted them.
    """

    path: Path
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: Names = dataclasses.field(default_factory=Names)
    lanes: Names = dataclasses.field(default_factory=Names)
    gpu: Table = dataclasses.field(default_factory=Table)
    correlations: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    collective_names: dict[int, str] = dataclasses.field(default_factory=dict)
    message_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    launches: Launches = dataclasses.field(default_factory=Launches)
    annotations: Table = dataclasses.field(default_factory=Table)
    gpu_annotations: Table = dataclasses.field(default_factory=Table)
    work: Table = dataclasses.field(default_factory=Table)
    collective_calls: Table = dataclasses.field(default_factory=Table)
    region_calls: Table = dataclasses.field(default_factory=Table)
    last_work: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return len(self.gpu) > 0


def read_events(path: str | Path) -> TraceEvents:
    """Read one file event by event, see `read_trace` for what it may be and for the errors."""
    kept = TraceEvents(Path(path))
    for event in read_trace(path, kept.metadata):
        if event.get("ph") != "X" or "ts" not in event:
            continue
        try:
            begin = float(event["ts"])
            _keep(kept, event, begin, begin + float(event.get("dur", 0.0)))
        except (TypeError, ValueError, AttributeError) as error:
            instead = "Check that nothing but torch.profiler wrote the file."
            raise TraceFileError(path, f"the event {str(event)[:80]} ({error})", instead) from error
    return kept


def _keep(kept: TraceEvents, event: dict[str, Any], begin: float, end: float) -> None:
    category = event.get("cat")
    name = str(event.get("name", ""))
    if category in _GPU_CATEGORIES:
        _keep_gpu_work(kept, event, name, begin, end)
    elif category in _LAUNCH_CATEGORIES:
        correlation = event.get("args", {}).get("correlation")
        # Of the runtime's calls only those that launch have work to be matched with; the others are as numerous.
        if correlation is not None and ("launch" in name.lower() or "mem" in name.lower()):
            kept.launches.append(int(correlation), begin, _lane(kept, event))
    elif category == "user_annotation":
        kept.annotations.append(begin, end, kept.names.index(name), _lane(kept, event))
    elif category == "gpu_user_annotation":
        kept.gpu_annotations.append(begin, end, kept.names.index(name), _lane(kept, event))
    elif category == "cpu_op" and not kept.is_gpu:
        _keep_cpu_op(kept, event, name, begin, end)


def _keep_gpu_work(kept: TraceEvents, event: dict[str, Any], name: str, begin: float, end: float) -> None:
    if not kept.is_gpu:  # what was kept before it was known that there is a GPU
        kept.work, kept.collective_calls, kept.region_calls = Table(), Table(), Table()
        kept.message_bytes.clear()
    arguments = event.get("args", {})
    if is_collective_kernel(name):
        index = len(kept.gpu)
        kept.message_bytes[index] = num_bytes_of(arguments)
        kept.collective_names[index] = str(arguments.get("Collective name", ""))
    kept.gpu.append(begin, end, kept.names.index(name), _lane(kept, event))
    kept.correlations.append(int(arguments.get("correlation", _NO_CORRELATION)))


def _keep_cpu_op(kept: TraceEvents, event: dict[str, Any], name: str, begin: float, end: float) -> None:
    lane = _lane(kept, event)
    if is_cpu_work(name):
        # Most operators lie inside one that is kept: `aten::addmm` calls a dozen others.
        outer_begin, outer_end = kept.last_work.get(lane, (0.0, 0.0))
        if outer_begin <= begin and end <= outer_end:
            return
        kept.last_work[lane] = (begin, end)
        table = kept.work
    elif is_collective_op(name):
        table = kept.collective_calls
        num_bytes = num_bytes_of(event.get("args", {}))
        if num_bytes:
            kept.message_bytes[len(table)] = num_bytes
    elif name == "fsdp_passes::region_begin":
        table = kept.region_calls
    else:
        return
    table.append(begin, end, kept.names.index(name), lane)


def _lane(kept: TraceEvents, event: dict[str, Any]) -> int:
    return kept.lanes.index((str(event.get("pid")), str(event.get("tid"))))
