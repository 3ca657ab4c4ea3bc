"""The trace report: what a real run's communication cost, from traces of torch.profiler."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from fsdp_passes.cost.timeline import Timeline
from fsdp_passes.errors import OptionValueError, TraceFileError
from fsdp_passes.inspect.page import PageSection, timeline_page
from fsdp_passes.inspect.trace_measure import (
    MeasuredCollective,
    Owner,
    StepTimes,
    compute_and_idle_by_owner,
    measure_collectives,
    measure_step,
)
from fsdp_passes.inspect.trace_rank import RankTrace, read_rank
from fsdp_passes.inspect.trace_text import report_text
from fsdp_passes.inspect.trace_timeline import step_timeline

SCHEMA = "fsdp_passes.trace_report/1"


@dataclasses.dataclass(frozen=True)
class UnitTimes:
    """One unit in one phase; microseconds, bytes and counts are means of a step of a rank.

    `communication_us` = hidden_us + exposed_us is summed over the unit's collectives; `idle_us` passes right before the
    unit computes, without any communication; `waiting_us` as in `MeasuredCollective`.
    """

    unit: str
    phase: str
    compute_us: float
    idle_us: float
    communication_us: float
    hidden_us: float
    exposed_us: float
    waiting_us: float
    num_collectives: float
    num_bytes: float


@dataclasses.dataclass(frozen=True)
class TraceReport:
    """What `trace_report` found.

    Attributes:
        timelines: one per file, of the step whose duration is the median over all ranks.
        steps: one per rank and step.
        units: one per unit and phase, in the order in which they compute; `("", "")` is what belongs to no unit.
        total: the sum of `units`.
        collectives: every collective of every rank and step, in order of their start.
    """

    timelines: tuple[Timeline, ...]
    steps: tuple[StepTimes, ...]
    units: tuple[UnitTimes, ...]
    total: UnitTimes
    collectives: tuple[MeasuredCollective, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(step.rank for step in self.steps))

    @property
    def exposed_collectives(self) -> tuple[MeasuredCollective, ...]:
        """Those that compute does not hide, the most exposed first."""
        exposed = (one for one in self.collectives if one.exposed_us > 0)
        return tuple(sorted(exposed, key=lambda one: -one.exposed_us))

    def text(self, max_collectives: int = 12) -> str:
        """Tables for a terminal, with the `max_collectives` most exposed collectives."""
        return report_text(self, max_collectives)

    def to_dict(self) -> dict[str, object]:
        """What `to_json` writes: `schema`, `steps`, `units`, `total` and `collectives`, each entry with the attributes
        of its class. `hidden_behind` is a list of {unit, phase, time_us}."""
        collectives = []
        for one in self.collectives:
            entry = {**vars(one)}
            entry["hidden_behind"] = [
                {"unit": unit, "phase": phase, "time_us": time} for (unit, phase), time in one.hidden_behind.items()
            ]
            collectives.append(entry)
        return {
            "schema": SCHEMA,
            "steps": [{**vars(step), "hidden_us": step.hidden_us} for step in self.steps],
            "units": [vars(unit) for unit in self.units],
            "total": vars(self.total),
            "collectives": collectives,
        }

    def to_json(self, path: str | Path) -> None:
        """Write everything but the timelines as JSON, see `to_dict`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write the timelines of all ranks as one page on a common time axis, each from the begin of its own step."""
        section = PageSection("Measured", self.timelines)
        Path(path).write_text(timeline_page("FSDP trace report", [section]), encoding="utf-8")


def trace_report(paths: Sequence[str | Path]) -> TraceReport:
    """Read the traces of one run, one file per rank, and account for its communication.

    Files are Chrome traces of torch.profiler, plain or gzipped, of this library's or of FSDP2's runs on GPUs or on the
    CPU; a file of 1 GB is read event by event. Collectives of several ranks are matched by their order within a step.

    Raises:
        TraceFileError: a file is missing, is no trace, is cut off, holds no work, or has a rank's step that another
            has too.
        OptionValueError: `paths` is empty.
    """
    if not paths:
        raise OptionValueError("paths", list(paths), "at least one trace file")
    traces = [read_rank(path, position) for position, path in enumerate(paths)]
    _check_ranks(traces)
    measured = [measure_collectives(trace) for trace in traces]
    _note_waiting(measured)
    steps = [measure_step(trace, step) for trace in traces for step in trace.steps]
    everything = [one for of_rank in measured for one in of_rank]
    units = _unit_times(traces, everything)
    number = _median_step(steps)
    timelines = [
        step_timeline(trace, next((s for s in trace.steps if s.number == number), trace.steps[-1]), of_rank)
        for trace, of_rank in zip(traces, measured, strict=True)
    ]
    return TraceReport(tuple(timelines), tuple(steps), tuple(units), _total(units), tuple(everything))


def _check_ranks(traces: Sequence[RankTrace]) -> None:
    """A rank may have several files, one for each time that its profiler stopped, but not the same step twice."""
    seen: dict[tuple[int, int], Path] = {}
    for trace in traces:
        for step in trace.steps:
            key = (trace.rank, step.number)
            if key in seen:
                found = f"step {step.number} of rank {trace.rank}, which {seen[key]} has too"
                raise TraceFileError(trace.path, found, "Give each rank's file once, all of one run.")
        seen |= {(trace.rank, step.number): trace.path for step in trace.steps}


def _note_waiting(measured: list[list[MeasuredCollective]]) -> None:
    """A collective ends everywhere at about the same time, so who came last has the shortest one."""
    if len(measured) < 2:
        return
    matched: dict[tuple[object, ...], list[MeasuredCollective]] = defaultdict(list)
    for of_rank in measured:
        seen: dict[tuple[object, ...], int] = defaultdict(int)
        for one in of_rank:
            key = (one.step, one.unit, one.phase, one.kind)
            occurrence = (*key, seen[key])
            matched[occurrence].append(one)
            seen[key] += 1
    for group in matched.values():
        if len(group) == len(measured):
            shortest = min(one.duration_us for one in group)
            for one in group:
                one.waiting_us = one.duration_us - shortest


def _median_step(steps: Iterable[StepTimes]) -> int:
    by_number: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        by_number[step.step].append(step.wall_us)
    most = max(len(times) for times in by_number.values())
    means = sorted((fmean(times), number) for number, times in by_number.items() if len(times) == most)
    return means[(len(means) - 1) // 2][1]


def _unit_times(traces: list[RankTrace], collectives: list[MeasuredCollective]) -> list[UnitTimes]:
    num_steps = sum(len(trace.steps) for trace in traces)
    compute: dict[Owner, float] = defaultdict(float)
    idle: dict[Owner, float] = defaultdict(float)
    for trace in traces:
        for sums, more in zip((compute, idle), compute_and_idle_by_owner(trace), strict=True):
            for owner, time in more.items():
                sums[owner] += time
    by_owner: dict[Owner, list[MeasuredCollective]] = defaultdict(list)
    for one in collectives:
        by_owner[one.unit, one.phase].append(one)
    owners = sorted({*compute, *idle, *by_owner}, key=_order_of_owners(traces, collectives))
    return [
        UnitTimes(
            unit,
            phase,
            compute[unit, phase] / num_steps,
            idle[unit, phase] / num_steps,
            sum(one.duration_us for one in by_owner[unit, phase]) / num_steps,
            sum(one.hidden_us for one in by_owner[unit, phase]) / num_steps,
            sum(one.exposed_us for one in by_owner[unit, phase]) / num_steps,
            sum(one.waiting_us for one in by_owner[unit, phase]) / num_steps,
            len(by_owner[unit, phase]) / num_steps,
            sum(one.num_bytes for one in by_owner[unit, phase]) / num_steps,
        )
        for unit, phase in owners
    ]


def _order_of_owners(
    traces: list[RankTrace], collectives: list[MeasuredCollective]
) -> Callable[[Owner], tuple[object, ...]]:
    """Forward before backward, what has no unit last; within a phase as the units first compute, then those that only
    communicate. When a unit's first collective starts says less: schedules move it, and one of the forward may be the
    prefetch of the backward's first gather."""
    owners = (owner for trace in traces for owner in trace.compute.all_owners)
    place = {owner: index for index, owner in enumerate(dict.fromkeys(owners))}
    for one in collectives:
        place.setdefault((one.unit, one.phase), len(place))
    phases = {"forward": 0, "backward": 1}
    return lambda owner: (not owner[0], phases.get(owner[1], 2), place.get(owner, len(place)), owner)


def _total(units: list[UnitTimes]) -> UnitTimes:
    names = [field.name for field in dataclasses.fields(UnitTimes) if field.name not in ("unit", "phase")]
    return UnitTimes("total", "", **{name: sum(getattr(unit, name) for unit in units) for name in names})
