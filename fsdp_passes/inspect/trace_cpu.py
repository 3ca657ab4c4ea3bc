"""Work of ranks that compute on the CPU: operators, and a backend's threads that communicate beside them."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator

from fsdp_passes.inspect.intervals import IntervalUnion
from fsdp_passes.inspect.trace_contexts import Contexts
from fsdp_passes.inspect.trace_events import Table, TraceEvents
from fsdp_passes.inspect.trace_names import (
    COMMUNICATION,
    COMPUTE,
    collective_kind,
    is_backend_annotation,
    is_transfer,
    meaning_of,
)
from fsdp_passes.inspect.trace_work import Collective, Work, new_collective


def understand_cpu_work(events: TraceEvents, contexts: Contexts) -> tuple[Work, Work, list[Collective]]:
    """Sort a CPU rank's work into compute, copies and collectives.

    Collectives are what the backend's own threads run (`gloo:all_gather`), and sends and receives that were started in
    the region of a collective (`gloo:send` in `FSDP:u:all_gather`): all of one region are one. Compute is operators on
    the other threads; the time in calls that start a collective or wait for one is neither. Code that Inductor compiled
    shows no operators, so there the regions that it opens count as compute.
    """
    backend_lanes = {
        events.annotations.lanes[index]
        for index in range(len(events.annotations))
        if _is_run(events.names.all[events.annotations.names[index]])
    }
    in_calls = _calls_by_lane(events.collective_calls)
    compute, copies = Work(), Work()
    busy_until: dict[int, float] = defaultdict(lambda: float("-inf"))
    for begin, end, name, lane in _work_in_order(events, in_calls):
        # What an operator calls lies inside it and is counted with it.
        if lane in backend_lanes or begin < busy_until[lane]:
            continue
        busy_until[lane] = end
        meaning = contexts.at(lane, begin)
        is_copy = meaning.role == COMMUNICATION or in_calls.get(lane, _NO_CALLS).covered(begin, end) > 0
        (copies if is_copy else compute).append(begin, end, (meaning.unit, meaning.phase), name)
    return compute, copies, [*_collectives(events, contexts), *_exchanges(events, contexts)]


def _is_run(name: str) -> bool:
    """Whether an annotation is what a thread of the backend's own ran."""
    return is_backend_annotation(name) and not is_transfer(name)


_NO_CALLS = IntervalUnion(())


def _calls_by_lane(calls: Table) -> dict[int, IntervalUnion]:
    by_lane: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for begin, end, lane in zip(calls.begins, calls.ends, calls.lanes, strict=True):
        by_lane[lane].append((begin, end))
    return {lane: IntervalUnion(intervals) for lane, intervals in by_lane.items()}


def _work_in_order(events: TraceEvents, in_calls: dict[int, IntervalUnion]) -> Iterator[tuple[float, float, int, int]]:
    """(begin, end, name, lane) of operators, and of compiled regions without their calls of collectives."""
    work = events.work
    regions: list[tuple[float, float, int, int]] = []
    opened = _calls_by_lane(events.region_calls)
    for index in range(len(events.annotations)):
        lane, name = events.annotations.lanes[index], events.annotations.names[index]
        begin, end = events.annotations.begins[index], events.annotations.ends[index]
        meaning = meaning_of(events.names.all[name])
        # The eager fallback opens the same regions, but around waits and nested units.
        if meaning is None or meaning.role != COMPUTE or not opened.get(lane, _NO_CALLS).parts(begin, begin + 1e-6):
            continue
        regions += [(*gap, name, lane) for gap in in_calls.get(lane, _NO_CALLS).gaps(begin, end)]
    regions.sort(key=_order)
    operators = ((work.begins[i], work.ends[i], work.names[i], work.lanes[i]) for i in work.in_order())
    return heapq.merge(operators, regions, key=_order)


def _order(work: tuple[float, float, int, int]) -> tuple[float, float]:
    """By begin; what contains others comes before them."""
    return work[0], -work[1]


def _collectives(events: TraceEvents, contexts: Contexts) -> list[Collective]:
    """The backend's runs, each with the call that started it."""
    runs: dict[str, list[int]] = defaultdict(list)
    for index in events.annotations.in_order():
        name = events.names.all[events.annotations.names[index]]
        if _is_run(name):
            runs[_queue(name)].append(index)
    calls: dict[str, list[int]] = defaultdict(list)
    for index in events.collective_calls.in_order():
        name = events.names.all[events.collective_calls.names[index]]
        if name.startswith("c10d::"):
            calls[_queue(name)].append(index)
    found = []
    for queue, run_indices in runs.items():
        callers = _match(events, calls[queue], run_indices)
        for run, call in zip(run_indices, callers, strict=True):
            name = events.names.all[events.annotations.names[run]]
            begin, end, lane = (
                events.annotations.begins[run],
                events.annotations.ends[run],
                events.annotations.lanes[run],
            )
            launch, kind, num_bytes, meaning = None, collective_kind(name), 0, contexts.at(lane, begin)
            if call is not None:
                table = events.collective_calls
                launch = (table.lanes[call], table.begins[call])
                kind = collective_kind(events.names.all[table.names[call]])
                num_bytes = events.message_bytes.get(call, 0)
                meaning = contexts.at(*launch)
            found.append(new_collective(begin, end, kind, name, lane, meaning, num_bytes, launch))
    return found


def _exchanges(events: TraceEvents, contexts: Contexts) -> list[Collective]:
    """Sends and receives, those of one region as one collective of the region's kind: this library's exchange."""
    regions: dict[int, list[int]] = defaultdict(list)
    begins: dict[int, list[float]] = defaultdict(list)
    found: dict[int, Collective] = {}
    for index in events.annotations.in_order():
        name, lane = events.names.all[events.annotations.names[index]], events.annotations.lanes[index]
        begin, end = events.annotations.begins[index], events.annotations.ends[index]
        meaning = meaning_of(name)
        if meaning is not None and meaning.role == COMMUNICATION:
            regions[lane].append(index)
            begins[lane].append(begin)
        if not is_transfer(name):
            continue
        at = bisect_right(begins[lane], begin) - 1
        region = regions[lane][at] if at >= 0 and begin < events.annotations.ends[regions[lane][at]] else index
        if region in found:
            found[region].end = max(found[region].end, end)
            continue
        kind = collective_kind(events.names.all[events.annotations.names[region]])
        meaning = contexts.at(lane, begin)
        found[region] = new_collective(begin, end, kind, name, lane, meaning, 0, (lane, begin))
    return [*found.values()]


def _queue(name: str) -> str:
    """Calls and runs of one queue keep their order. gloo runs a reduce-scatter as an all-reduce."""
    kind = collective_kind(name)
    return "all_reduce" if kind == "reduce_scatter" else kind


def _match(events: TraceEvents, calls: list[int], runs: list[int]) -> list[int | None]:
    """For each run the call that started it."""
    if len(calls) == len(runs):
        return [*calls]
    # gloo runs a coalesced reduce-scatter as one all-reduce for each tensor, of which the call makes a clone.
    clones = Counter[int]()
    order = sorted(calls, key=events.collective_calls.begins.__getitem__)
    begins = [events.collective_calls.begins[call] for call in order]
    for begin, name, lane in zip(events.work.begins, events.work.names, events.work.lanes, strict=True):
        if events.names.all[name] != "aten::clone":
            continue
        at = bisect_right(begins, begin) - 1
        if at >= 0 and begin < events.collective_calls.ends[order[at]]:
            clones[order[at]] += events.collective_calls.lanes[order[at]] == lane
    repeated: list[int | None] = [call for call in order for _ in range(max(1, clones[call]))]
    if len(repeated) == len(runs):
        return repeated
    # Calls or runs are missing (the profiler began or ended between them): the latest call before each run.
    latest = [bisect_right(begins, events.annotations.begins[run]) - 1 for run in runs]
    return [order[at] if at >= 0 else None for at in latest]
