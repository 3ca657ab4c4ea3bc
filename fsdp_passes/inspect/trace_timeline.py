"""One step of a rank's trace as a `Timeline`, as the page draws it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from fsdp_passes.cost.timeline import MemoryPoint, Span, Timeline
from fsdp_passes.inspect.trace_measure import MeasuredCollective
from fsdp_passes.inspect.trace_names import is_backend_annotation
from fsdp_passes.inspect.trace_rank import UNMARKED_STEP, RankTrace, Step
from fsdp_passes.inspect.trace_work import Work

# Neighbouring kernels of one unit are drawn as one when the pause between them is below this part of the step: less
# than a pixel on any screen. What is exposed was measured before, on every kernel.
MERGED_PAUSE = 1 / 4000


def step_timeline(trace: RankTrace, step: Step, measured: list[MeasuredCollective]) -> Timeline:
    """The timeline of one step; `measured` are the collectives of this rank."""
    collectives = [one for one in measured if one.step == step.number]
    spans = _work_spans(trace, step, trace.compute, "compute", "compute")
    merged = sum(span.duration_us for span in spans) - trace.compute_union.covered(step.begin, step.end)
    spans += _work_spans(trace, step, trace.copies, "copies", "other")
    for one, row in zip(collectives, _rows(trace, step, collectives), strict=True):
        spans.append(
            Span(
                row, one.unit, one.phase, one.kind, one.name, one.start_us, one.duration_us, one.num_bytes,
                one.exposed_us, one.reason,
            )
        )  # fmt: skip
    spans.sort(key=lambda span: (span.start_us, span.row))
    of_step = f", step {step.number}" if step.number != UNMARKED_STEP else ""
    return Timeline(f"rank {trace.rank}{of_step}", tuple(spans), _memory(spans), is_measured=True, merged_us=merged)


def _work_spans(trace: RankTrace, step: Step, work: Work, row: str, kind: str) -> list[Span]:
    pause = (step.end - step.begin) * MERGED_PAUSE
    spans: list[Span] = []
    groups: list[list[int]] = []
    reach = 0.0
    for index in range(bisect_left(work.begins, step.begin), bisect_left(work.begins, step.end)):
        same = groups and work.owners[groups[-1][0]] == work.owners[index]
        if same and work.begins[index] - reach <= pause:
            groups[-1].append(index)
            reach = max(reach, work.ends[index])
        else:
            groups.append([index])
            reach = work.ends[index]
    for group in groups:
        unit, phase = work.owner(group[0])
        begin, end = work.begins[group[0]], max(work.ends[index] for index in group)
        longest = max(group, key=lambda index: work.ends[index] - work.begins[index])
        name = trace.names[work.names[longest]]
        if len(group) > 1:
            name += f" and {len(group) - 1} more"
        spans.append(Span(row, unit, phase, kind, name, begin - step.begin, end - begin))
    return spans


def _rows(trace: RankTrace, step: Step, measured: list[MeasuredCollective]) -> list[str]:
    """The row of each collective: one for each stream. A CPU backend's threads are interchangeable, so there a row is
    taken when it is free."""
    lanes = [one.lane for one in trace.collectives if step.begin <= one.begin < step.end]
    if measured and is_backend_annotation(measured[0].name):
        ends: list[float] = []
        for index, one in enumerate(measured):
            free = next((row for row, end in enumerate(ends) if end <= one.start_us), len(ends))
            ends[free : free + 1] = [one.start_us + one.duration_us]
            lanes[index] = free
    order = list(dict.fromkeys(lanes))
    if len(order) == 1:
        return ["communication"] * len(lanes)
    return [f"communication {order.index(lane) + 1}" for lane in lanes]


def _memory(spans: list[Span]) -> tuple[MemoryPoint, ...]:
    """Bytes of gathered parameters over time, empty where the trace does not say how many bytes a gather moved.

    A gathered parameter counts from the begin of its gather to the end of its unit's last compute before the unit
    gathers again: that is when it can be released.
    """
    changes: dict[float, int] = defaultdict(int)
    gathers = [span for span in spans if span.kind == "all_gather" and span.unit and span.num_bytes]
    for gather in gathers:
        later = [other.start_us for other in gathers if other.unit == gather.unit and other.start_us > gather.end_us]
        until = min(later, default=float("inf"))
        uses = [s.end_us for s in spans if s.kind == "compute" and s.unit == gather.unit and s.end_us <= until]
        end = max([gather.end_us, *uses])
        changes[gather.start_us] += gather.num_bytes
        changes[end] -= gather.num_bytes
    points, alive = [], 0
    for time in sorted(changes):
        alive += changes[time]
        points.append(MemoryPoint(time, alive))
    return tuple(points)
