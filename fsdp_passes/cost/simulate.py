"""Run a schedule on a clock: one compute row, and one or two communication rows.

The rules are those of streams. Compute steps run one behind the other. A collective begins when the compute row has
reached its start and the collective before it on its row has ended. A wait holds the compute row until its collective
has ended.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

from fsdp_passes.cost.timeline import Span

COMPUTE_ROW = "compute"


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """A step with its duration.

    Attributes:
        kind: "compute", "start" or "wait".
        name, unit, phase: as in `Span`.
        duration_us: of a compute step, or of the collective that is started.
        key: tells which start a wait belongs to.
        row: communication row of a start.
        collective: "all_gather", "reduce_scatter" or "all_reduce" for a start.
        num_bytes: of the collective's whole tensors.
    """

    kind: str
    name: str
    unit: str = ""
    phase: str = ""
    duration_us: float = 0.0
    key: Any = None
    row: str = "communication"
    collective: str = "other"
    num_bytes: int = 0


@dataclasses.dataclass
class _Flight:
    """A collective on its way: its step, when it ran, and how the compute row stood."""

    step: TimedStep
    begin_us: float
    end_us: float
    issued_us: float
    queued_behind: _Flight | None
    computed_before_us: float  # compute done when it was started
    wait_us: float | None = None
    held_us: float = 0.0  # how long its own wait held the compute row
    computed_until_wait_us: float = 0.0


def simulate(steps: Sequence[TimedStep]) -> tuple[tuple[Span, ...], list[float]]:
    """The spans of a schedule in order of their start, and for each step the time at which the compute row is behind
    it (of a start: at which the collective begins).

    Compute steps without duration make no span. Raises ValueError for a wait without a start before it.
    """
    now = computed = 0.0
    free: dict[str, _Flight] = {}
    flights: dict[Any, _Flight] = {}
    spans: list[Span] = []
    idle: list[tuple[float, float]] = []
    times: list[float] = []
    for step in steps:
        if step.kind == "compute":
            if step.duration_us > 0:
                spans.append(Span(COMPUTE_ROW, step.unit, step.phase, "compute", step.name, now, step.duration_us))
            now += step.duration_us
            computed += step.duration_us
            times.append(now)
        elif step.kind == "start":
            before = free.get(step.row)
            begin = max(now, before.end_us) if before is not None else now
            queued = before if before is not None and before.end_us > now else None
            flight = _Flight(step, begin, begin + step.duration_us, now, queued, computed)
            free[step.row] = flights[step.key] = flight
            times.append(begin)
        else:
            if step.key not in flights:
                raise ValueError(f"{step.name}: expected a start before the wait, found none")
            flight = flights[step.key]
            if flight.wait_us is None:
                flight.wait_us, flight.computed_until_wait_us = now, computed
            if flight.end_us > now:
                idle.append((now, flight.end_us))
                flight.held_us += flight.end_us - now
                now = flight.end_us
            times.append(now)
    total_computed = computed
    starts = [begin for begin, _ in idle]
    for flight in flights.values():
        exposed = _overlap(idle, starts, flight.begin_us, flight.end_us)
        reason = _reason(flight, total_computed) if exposed > 0 else ""
        step = flight.step
        spans.append(
            Span(
                step.row,
                step.unit,
                step.phase,
                step.collective,
                step.name,
                flight.begin_us,
                flight.end_us - flight.begin_us,
                step.num_bytes,
                exposed,
                reason,
            )
        )
    spans.sort(key=lambda span: (span.start_us, span.row != COMPUTE_ROW))
    return tuple(spans), times


def _overlap(idle: list[tuple[float, float]], starts: list[float], begin: float, end: float) -> float:
    """How much of [begin, end] the idle intervals (disjoint, in order, beginning at `starts`) cover."""
    total = 0.0
    for left, right in idle[max(0, bisect.bisect_right(starts, begin) - 1) :]:
        if left >= end:
            break
        total += max(0.0, min(end, right) - max(begin, left))
    return total


def _reason(flight: _Flight, total_computed: float) -> str:
    """Why the compute row stood still while this collective ran."""
    if flight.held_us == 0:
        return "a collective behind it on its row is awaited"
    hidden_by = flight.computed_until_wait_us - flight.computed_before_us
    if hidden_by == 0 and flight.computed_before_us == 0:
        return "first of the graph: nothing computes before it"
    if hidden_by == 0 and flight.computed_until_wait_us == total_computed:
        return "last of the graph: nothing is left to compute"
    if hidden_by == 0:
        return "nothing computes between its start and its wait"
    takes = f"takes {flight.end_us - flight.begin_us:.0f} us"
    if flight.queued_behind is None:
        return f"{takes}, the compute meanwhile only {hidden_by:.0f} us"
    other, queued = flight.queued_behind.step, flight.begin_us - flight.issued_us
    behind = f"queued {queued:.0f} us behind the {other.collective} of {other.unit}"
    if queued >= flight.held_us:
        return behind
    return f"{behind}, then {takes}; the compute meanwhile only {hidden_by:.0f} us"
