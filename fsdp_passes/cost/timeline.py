"""A timeline as data: what the cost model predicts, what the trace report measures, and what the page draws."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that occupies one row for a while.

    Attributes:
        row: "compute", or the name of a communication row ("communication"; with two streams one name each).
        unit: display name of the unit that it belongs to; "" when none is known.
        phase: "forward", "backward" or "".
        kind: "compute", "all_gather", "reduce_scatter", "all_reduce" or "other".
        name: of the kernel, the graph step or the collective.
        start_us, duration_us: microseconds from the beginning of the timeline.
        num_bytes: bytes of a collective's whole (gathered or unreduced) tensors; 0 for compute.
        exposed_us: the part of a collective during which the compute row is idle.
        reason: why it is exposed, in words; "" when it is not.
    """

    row: str
    unit: str
    phase: str
    kind: str
    name: str
    start_us: float
    duration_us: float
    num_bytes: int = 0
    exposed_us: float = 0.0
    reason: str = ""

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclasses.dataclass(frozen=True)
class MemoryPoint:
    """From `time_us` on, `num_bytes` of gathered parameters are alive."""

    time_us: float
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Spans of one step (or one graph) in order of their start, and the curve of unsharded bytes.

    `is_measured` tells times from a trace from predicted ones. `merged_us` is time in which nothing computes although a
    span of the compute row covers it, since it stands for many kernels.
    """

    title: str
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...] = ()
    is_measured: bool = False
    merged_us: float = 0.0

    @property
    def total_us(self) -> float:
        """From the beginning to the end of the last span."""
        return max((span.end_us for span in self.spans), default=0.0)

    @property
    def compute_us(self) -> float:
        return sum(span.duration_us for span in self.spans if span.row == "compute") - self.merged_us

    @property
    def exposed_us(self) -> float:
        """Communication that nothing hides, in total."""
        return sum(span.exposed_us for span in self.spans)
