"""The invariants of a schedule, checked on an FX graph and again on Inductor's final kernel order.

See "Invariants" in docs/design.md for the numbers. Nothing here communicates: ranks may compile at different times.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence

from fsdp_passes.errors import ScheduleError, ScheduleWarning
from fsdp_passes.regions import ALL_GATHER_REGION, ALL_REDUCE_REGION, REDUCE_SCATTER_REGION
from fsdp_passes.schedule import ALL_GATHER, Bucket, ScheduleEvent

_COMMUNICATION_REGIONS = (ALL_GATHER_REGION, REDUCE_SCATTER_REGION, ALL_REDUCE_REGION)


@dataclasses.dataclass(frozen=True)
class ScheduleReport:
    """What was found while checking.

    Attributes:
        problems: violations that make results wrong or undefined (invariant 1, regions out of balance).
        losses: violations that cost speed or memory and leave the results right (invariants 2, 3 and 5).
        exceptions: reasons why a unit is not hidden or stays unsharded longer, none of them a violation.
        max_unsharded_units: most units gathered at once, the kept ones (root) aside.
        max_unsharded_bytes: bytes of those, in the compute dtype.
    """

    problems: tuple[str, ...]
    losses: tuple[str, ...]
    exceptions: tuple[str, ...]
    max_unsharded_units: int
    max_unsharded_bytes: int


def verify_schedule(events: Sequence[ScheduleEvent], *, prefetch: int, where: str) -> ScheduleReport:
    """Check and report. `where` names the graph in messages.

    Raises `ScheduleError` for `problems`: training on would compute with memory that is being overwritten. Warns with
    `ScheduleWarning` for `losses`: a model that Inductor fuses in a new way must still train.
    """
    report = check_schedule(events, prefetch=prefetch)
    if report.problems:
        raise ScheduleError(where, report.problems)
    if report.losses:
        listed = "".join(f"\n  - {loss}" for loss in report.losses)
        message = f"{where}: expected communication to be hidden one layer ahead; results are right, but:{listed}"
        warnings.warn(message, ScheduleWarning, stacklevel=2)
    return report


def check_schedule(events: Sequence[ScheduleEvent], *, prefetch: int) -> ScheduleReport:
    """Check invariants 1, 2, 3 and 5 and the balance of the regions, without raising."""
    timeline = _Timeline(events)
    problems = [*_check_waits(timeline), *_check_regions(events)]
    if problems:  # the rest asks where the one start and the waits of a bucket are
        return ScheduleReport(tuple(problems), (), (), 0, 0)
    ahead_losses, ahead_exceptions = _check_one_layer_ahead(timeline, prefetch)
    max_units, max_bytes, memory_losses, late = _check_unsharded(timeline, prefetch)
    losses = [*_check_once(timeline), *ahead_losses, *memory_losses]
    return ScheduleReport((), tuple(losses), (*ahead_exceptions, *late), max_units, max_bytes)


def with_unit_names(report: ScheduleReport, unit_names: Sequence[str]) -> ScheduleReport:
    """The report with units called by their names: what is compiled once for all layers knows their numbers only."""

    def name(match: re.Match[str]) -> str:
        return match[1] + ", ".join(unit_names[int(number)] for number in match[2].split(", "))

    def named(texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(re.sub(r"\b(units? )(\d+(?:, \d+)*)", name, text) for text in texts)

    return dataclasses.replace(
        report, problems=named(report.problems), losses=named(report.losses), exceptions=named(report.exceptions)
    )


class _Timeline:
    """Where each bucket's start, waits and reads are."""

    def __init__(self, events: Sequence[ScheduleEvent]) -> None:
        self.events = events
        self.starts: dict[Bucket, list[int]] = {}
        self.waits: dict[Bucket, list[int]] = {}
        self.reads: dict[Bucket, list[int]] = {}
        for index, event in enumerate(events):
            if event.kind == "start" and event.bucket is not None:
                self.starts.setdefault(event.bucket, []).append(index)
            elif event.kind == "wait" and event.bucket is not None:
                self.waits.setdefault(event.bucket, []).append(index)
            for bucket in event.reads:
                self.reads.setdefault(bucket, []).append(index)

    def gathers_by_first_read(self) -> list[list[Bucket]]:
        """The all-gathers of each run of a unit, in the order in which they are first read."""
        groups: dict[tuple[int, int], list[Bucket]] = {}
        for bucket in self.starts:
            if bucket.kind == ALL_GATHER and bucket in self.reads:
                groups.setdefault(bucket.group, []).append(bucket)
        return sorted(groups.values(), key=lambda buckets: (self.first_read(buckets), self.waits[buckets[0]][0]))

    def first_read(self, buckets: list[Bucket]) -> int:
        return min(self.reads[bucket][0] for bucket in buckets)


def _check_waits(timeline: _Timeline) -> list[str]:
    """Invariant 1, and that nothing reads between the waits of one bucket."""
    problems = []
    for bucket in {**timeline.starts, **timeline.waits}:
        starts, waits = timeline.starts.get(bucket, []), timeline.waits.get(bucket, [])
        if len(starts) != 1:
            problems.append(f"{bucket.label}: expected one start, found {len(starts)}")
            continue
        if not waits:
            problems.append(f"{bucket.label}: is started but never awaited")
            continue
        if len(waits) not in (1, bucket.num_params):
            expected = f"expected one wait, or one for each of its {bucket.num_params} results"
            problems.append(f"{bucket.label}: {expected}, found {len(waits)}")
        if waits[0] < starts[0]:
            problems.append(f"{bucket.label}: is awaited before it is started")
        reads = timeline.reads.get(bucket, [])
        if reads and reads[0] < waits[-1]:
            reader = timeline.events[reads[0]].name
            problems.append(f"{bucket.label}: {reader} reads a result before the last wait of its bucket")
        between = [e.name for e in timeline.events[waits[0] : waits[-1]] if e.kind == "compute"]
        if between:
            problems.append(f"{bucket.label}: {between[0]} runs between the waits of one bucket")
    return problems


def _check_once(timeline: _Timeline) -> list[str]:
    """Invariant 5, for a graph: no part of a unit has two collectives of one kind and dtype."""
    problems = []
    seen: dict[tuple[object, ...], Bucket] = {}
    for bucket in timeline.starts:
        key = (bucket.kind, bucket.group, bucket.half, str(bucket.dtype))
        if key in seen:
            problems.append(f"{bucket.label}: the unit already has {seen[key].label} in {bucket.dtype}")
        seen[key] = bucket
    return problems


def _check_one_layer_ahead(timeline: _Timeline, prefetch: int) -> tuple[list[str], list[str]]:
    """Invariant 2: start(i + prefetch) before the compute of i, wait(i + 1) behind it."""
    problems, exceptions = [], []
    units = timeline.gathers_by_first_read()
    for index, buckets in enumerate(units):
        for bucket in buckets:
            start, wait, read = timeline.starts[bucket][0], timeline.waits[bucket][0], timeline.first_read(buckets)
            if index == 0:
                if any(event.is_heavy for event in timeline.events[start:wait]):
                    continue
                exceptions.append(
                    f"{bucket.label}: nothing in this graph hides it, it is the first and nothing runs before it"
                )
                continue
            ahead = units[max(0, index - prefetch)]
            if start > timeline.first_read(ahead):
                problems.append(
                    f"{bucket.label}: starts behind the first use of unit {ahead[0].unit}, expected before it"
                )
            previous = units[index - 1]
            last = max(
                (i for other in previous for i in timeline.reads[other] if i < read),
                default=timeline.first_read(previous),
            )
            if timeline.first_read(previous) == read:
                exceptions.append(f"{bucket.label}: not hidden by unit {previous[0].unit}, one kernel reads both")
            elif wait < last:
                problems.append(
                    f"{bucket.label}: is awaited before the compute of unit {previous[0].unit}, expected behind it"
                )
    return problems, exceptions


def _check_unsharded(timeline: _Timeline, prefetch: int) -> tuple[int, int, list[str], list[str]]:
    """Invariant 3: units alive from start to last read; kept ones are not counted."""
    spans = []
    units = [buckets for buckets in timeline.gathers_by_first_read() if buckets[0].reshard]
    first_reads = [timeline.first_read(buckets) for buckets in units]
    late = []
    for index, buckets in enumerate(units):
        start = min(timeline.starts[bucket][0] for bucket in buckets)
        end = max(timeline.reads[bucket][-1] for bucket in buckets)
        following = first_reads[index + 1] if index + 1 < len(units) else len(timeline.events)
        if end >= following:
            reason = "one kernel reads it and the next unit" if end == following else "it is read again later"
            late.append(f"unit {buckets[0].unit}: stays unsharded beside the next unit, {reason}")
            end = following - 1
            while end > start and not any(bucket in timeline.events[end].reads for bucket in buckets):
                end -= 1
        spans.append((start, end, buckets))
    max_units = max_bytes = 0
    problems = []
    for start, _, _ in spans:
        alive = [buckets for s, e, buckets in spans if s <= start <= e]
        max_units = max(max_units, len(alive))
        max_bytes = max(max_bytes, sum(bucket.num_bytes for buckets in alive for bucket in buckets))
        if len(alive) > 1 + prefetch:
            names = ", ".join(str(buckets[0].unit) for buckets in alive)
            problems.append(f"units {names} are unsharded at once, expected at most {1 + prefetch}")
    return max_units, max_bytes, problems, late


def _check_regions(events: Sequence[ScheduleEvent]) -> list[str]:
    """Regions of compute open and close in turn; inside or between them, regions around one start each."""
    open_regions: list[str] = []
    for event in events:
        if event.kind == "region_begin":
            if open_regions and (len(open_regions) > 1 or event.text not in _COMMUNICATION_REGIONS):
                return [f"{event.name}: {event.text} opens inside {open_regions[-1]}; compute regions do not nest"]
            open_regions.append(event.text)
        elif event.kind == "region_end":
            if not open_regions:
                return [f"{event.name}: closes a region, and none is open"]
            open_regions.pop()
    return [f"the region {open_regions[-1]} is never closed"] if open_regions else []
