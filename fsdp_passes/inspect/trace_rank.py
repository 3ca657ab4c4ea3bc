"""One rank's trace as compute, copies and collectives, each with its unit, in steps."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from pathlib import Path

from fsdp_passes.errors import TraceFileError
from fsdp_passes.inspect.intervals import IntervalUnion
from fsdp_passes.inspect.trace_contexts import Contexts
from fsdp_passes.inspect.trace_cpu import understand_cpu_work
from fsdp_passes.inspect.trace_events import TraceEvents, read_events
from fsdp_passes.inspect.trace_gpu import understand_gpu_work
from fsdp_passes.inspect.trace_inference import infer_units
from fsdp_passes.inspect.trace_names import step_number
from fsdp_passes.inspect.trace_work import Collective, Work

UNMARKED_STEP = -1  # the profiler counts from 0


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a rank, from the begin of its first work to that of the next step's; times in microseconds.

    `number` is the profiler's; UNMARKED_STEP for a trace in which it marked none.
    """

    number: int
    begin: float
    end: float


@dataclasses.dataclass
class RankTrace:
    """One file, understood. `copies` pack and unpack what collectives move; they are neither compute nor transfer."""

    path: Path
    rank: int
    world_size: int
    is_gpu: bool
    steps: list[Step]
    compute: Work
    copies: Work
    collectives: list[Collective]
    names: list[str]

    def __post_init__(self) -> None:
        self.compute_union = IntervalUnion(self.compute, is_sorted=True)
        self.copy_union = IntervalUnion(self.copies, is_sorted=True)
        self.communication_union = IntervalUnion((one.begin, one.end) for one in self.collectives)

    def step_at(self, time: float) -> Step | None:
        """The step that a time lies in; None before the first and behind the last."""
        index = bisect_right(self.steps, time, key=lambda step: step.begin) - 1
        return self.steps[index] if index >= 0 and time < self.steps[index].end else None


def read_rank(path: str | Path, position: int) -> RankTrace:
    """Read and understand one file, the `position`-th of those given (its rank, where the trace does not say).

    Raises:
        TraceFileError: see `read_trace`; also when the trace holds no work.
    """
    events = read_events(path)
    contexts = Contexts(events.annotations, events.names)
    understand = understand_gpu_work if events.is_gpu else understand_cpu_work
    compute, copies, collectives = understand(events, contexts)
    if not len(compute) and not collectives:
        raise TraceFileError(
            path, "no kernel and no operator in it", "Record with ProfilerActivity.CPU, and CUDA on a GPU."
        )
    infer_units(collectives, contexts)
    collectives.sort(key=lambda one: one.begin)
    distributed = events.metadata.get("distributedInfo")
    info = distributed if isinstance(distributed, dict) else {}
    steps = _steps(events, (compute, copies), collectives)
    rank, world_size = int(info.get("rank", position)), int(info.get("world_size", 0))
    return RankTrace(Path(path), rank, world_size, events.is_gpu, steps, compute, copies, collectives, events.names.all)


def _steps(events: TraceEvents, works: tuple[Work, ...], collectives: list[Collective]) -> list[Step]:
    """The profiler's steps. On a GPU a step begins with the first kernel that was launched in it."""
    cpu_steps = []
    for index in events.annotations.in_order():
        number = step_number(events.names.all[events.annotations.names[index]])
        if number is not None:
            cpu_steps.append(Step(number, events.annotations.begins[index], events.annotations.ends[index]))
    last_end = max([*(max(work.ends) for work in works if len(work)), *(one.end for one in collectives)])
    if not cpu_steps:
        first = min([*(work.begins[0] for work in works if len(work)), *(one.begin for one in collectives[:1])])
        return [Step(UNMARKED_STEP, first, last_end)]
    if not events.is_gpu:
        return cpu_steps
    begins = [float("inf")] * len(cpu_steps)
    for index in range(len(events.gpu)):
        launch = events.launches.find(events.correlations[index])
        at = bisect_right(cpu_steps, launch[1], key=lambda step: step.begin) - 1 if launch is not None else -1
        if at >= 0:
            begins[at] = min(begins[at], events.gpu.begins[index])
    found = [(step.number, begin) for step, begin in zip(cpu_steps, begins, strict=True) if begin < float("inf")]
    if not found:  # nothing can be matched: the CPU's own times are the best guess
        return cpu_steps
    ends = [*(begin for _, begin in found[1:]), last_end]
    return [Step(number, begin, end) for (number, begin), end in zip(found, ends, strict=True)]
