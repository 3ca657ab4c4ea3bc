"""How much of a rank's communication its compute hides: per collective, per unit and per step."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections import defaultdict

from fsdp_passes.inspect.intervals import IntervalUnion
from fsdp_passes.inspect.trace_rank import RankTrace, Step
from fsdp_passes.inspect.trace_work import Collective

# Between two collectives that wait in one stream an H200 leaves 1.2 to 3.8 us (tests/data/nccl_compiled.rank0.json.gz).
QUEUE_GAP_US = 5.0

Owner = tuple[str, str]  # (unit, phase), each "" where it is not known


@dataclasses.dataclass
class MeasuredCollective:
    """One collective of one step; times in microseconds.

    Attributes:
        rank, step: where it ran; step -1 in a trace without marks of steps.
        unit, phase, kind, name: as in `Span`.
        start_us: from the begin of its step.
        duration_us: hidden_us + exposed_us. NCCL's kernels also wait for the other ranks in it.
        waiting_us: how much longer than on the rank where it took the shortest time; 0 with one rank's file alone.
        num_bytes: of the gathered or unreduced tensors; 0 where the trace does not say.
        hidden_behind: (unit, phase) -> microseconds of its compute that ran meanwhile.
        reason: why it is exposed, in words; "" when it is not.
    """

    rank: int
    step: int
    unit: str
    phase: str
    kind: str
    name: str
    start_us: float
    duration_us: float
    hidden_us: float
    exposed_us: float
    num_bytes: int
    hidden_behind: dict[Owner, float]
    reason: str
    waiting_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Where one step's time went, in microseconds: wall = compute + exposed + copies + idle.

    `communication_us` is the time in which any collective ran, `exposed_us` the part of it without compute, `copies_us`
    packing and unpacking beside neither.
    """

    rank: int
    step: int
    wall_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    copies_us: float
    idle_us: float

    @property
    def hidden_us(self) -> float:
        return self.communication_us - self.exposed_us


def measure_step(trace: RankTrace, step: Step) -> StepTimes:
    """Account for every microsecond of a step once."""
    window = (step.begin, step.end)
    exposed = trace.communication_union.minus(trace.compute_union)
    busy = IntervalUnion([*trace.compute_union.parts(*window), *trace.communication_union.parts(*window)])
    active = IntervalUnion([*busy, *trace.copy_union.parts(*window)])
    wall = step.end - step.begin
    return StepTimes(
        trace.rank,
        step.number,
        wall,
        trace.compute_union.covered(*window),
        trace.communication_union.covered(*window),
        exposed.covered(*window),
        active.covered(*window) - busy.covered(*window),
        wall - active.covered(*window),
    )


def measure_collectives(trace: RankTrace) -> list[MeasuredCollective]:
    """Every collective that begins within a step."""
    measured = []
    for index, one in enumerate(trace.collectives):
        step = trace.step_at(one.begin)
        if step is None:
            continue
        hidden = trace.compute_union.covered(one.begin, one.end)
        exposed = one.duration - hidden
        if exposed < 1e-6 * max(1.0, one.duration):  # rounding of the trace's clock
            hidden, exposed = one.duration, 0.0
        measured.append(
            MeasuredCollective(
                trace.rank,
                step.number,
                one.unit,
                one.phase,
                one.kind,
                one.name,
                one.begin - step.begin,
                one.duration,
                hidden,
                exposed,
                one.num_bytes,
                _hidden_behind(trace, one),
                _reason(trace, index, step) if exposed else "",
            )
        )
    return measured


def compute_and_idle_by_owner(trace: RankTrace) -> tuple[dict[Owner, float], dict[Owner, float]]:
    """Compute of each (unit, phase), and the idle time right before its compute, both in microseconds over all steps.

    Idle is time in which the rank neither computes nor communicates nor copies.
    """
    compute: dict[Owner, float] = defaultdict(float)
    idle: dict[Owner, float] = defaultdict(float)
    active = IntervalUnion([*trace.compute_union, *trace.communication_union, *trace.copy_union])
    for step in trace.steps:
        first = bisect_left(trace.compute.begins, step.begin)
        end = bisect_left(trace.compute.begins, step.end)
        for index in range(first, end):
            compute[trace.compute.owner(index)] += trace.compute.ends[index] - trace.compute.begins[index]
        for gap_begin, gap_end in active.gaps(step.begin, step.end):
            after = bisect_left(trace.compute.begins, gap_end)
            owner = trace.compute.owner(after) if after < end else ("", "")
            idle[owner] += gap_end - gap_begin
    return compute, idle


def _hidden_behind(trace: RankTrace, one: Collective) -> dict[Owner, float]:
    work = trace.compute
    found: dict[Owner, float] = defaultdict(float)
    index = _first_ending_after(trace, one.begin)
    while index < len(work) and work.begins[index] < one.end:
        found[work.owner(index)] += max(0.0, min(work.ends[index], one.end) - max(work.begins[index], one.begin))
        index += 1
    return {owner: time for owner, time in found.items() if time > 0}


def _first_ending_after(trace: RankTrace, time: float) -> int:
    """Index of the first work that may reach beyond `time`: work of several streams may overlap, so look at the
    stretch without a gap that `time` lies in."""
    parts = trace.compute_union.begins
    at = bisect_left(parts, time)
    start = parts[at - 1] if at > 0 and trace.compute_union.ends[at - 1] > time else time
    return bisect_left(trace.compute.begins, start)


def _reason(trace: RankTrace, number: int, step: Step) -> str:
    """What computed before the longest exposed part and what computes behind it, and so what would have to change."""
    one = trace.collectives[number]
    gap_begin, gap_end = max(trace.compute_union.gaps(one.begin, one.end), key=lambda gap: gap[1] - gap[0])
    before = _nearest_unit(trace, bisect_left(trace.compute.begins, gap_begin) - 1, -1, step)
    after = _nearest_unit(trace, bisect_left(trace.compute.begins, gap_end - 1e-3), +1, step)
    if after is None:
        then = "no unit computes behind it"
    elif trace.compute.owner(after)[0] == one.unit and one.kind == "all_gather":
        then = f"{describe(trace.compute.owner(after))} waits for it"
    else:
        then = f"{describe(trace.compute.owner(after))} computes next"
    if before is None:
        return f"no unit computes before it; {then}"
    owner = describe(trace.compute.owner(before))
    if after is not None and trace.compute.owner(after) == trace.compute.owner(before):
        return f"{owner} pauses while it runs"
    queued = _queued_behind(trace, number)
    if trace.compute.ends[before] <= one.begin:
        return f"{queued}; {then}" if queued else f"starts only when {owner} has computed; {then}"
    late = queued or "too late to be hidden"
    return f"starts {format_us(gap_begin - one.begin)} before {owner} stops computing, {late}; {then}"


def _queued_behind(trace: RankTrace, number: int) -> str:
    """Which collective of the same stream or thread held this one up, "" where none did.

    It was launched while the other ran and begins when that one ends: right then, or before any more work that it might
    have waited for has ended. An earlier launch would change nothing.
    """
    one = trace.collectives[number]
    before = next((other for other in reversed(trace.collectives[:number]) if other.lane == one.lane), None)
    if before is None or one.launch is None or not one.launch[1] < before.end <= one.begin:
        return ""
    works = (trace.compute_union, trace.copy_union)
    if one.begin - before.end > QUEUE_GAP_US and any(_ends_within(work, before.end, one.begin) for work in works):
        return ""
    return f"queued behind the {before.kind} of {describe((before.unit, before.phase))}"


def _ends_within(work: IntervalUnion, begin: float, end: float) -> bool:
    index = bisect_right(work.ends, begin)
    return index < len(work) and work.ends[index] <= end


def _nearest_unit(trace: RankTrace, index: int, direction: int, step: Step) -> int | None:
    """The first work of a unit from `index` on, within the step; None when only other work is left."""
    work = trace.compute
    while 0 <= index < len(work) and step.begin <= work.begins[index] < step.end:
        if work.owner(index)[0]:
            return index
        index += direction
    return None


def describe(owner: Owner) -> str:
    """ "layers.0 (forward)"; work that belongs to no unit is told so."""
    unit, phase = owner
    return f"{unit or 'no unit'} ({phase})" if phase else unit or "no unit"


def format_us(time_us: float) -> str:
    """A time with three significant digits and its unit."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if abs(time_us) >= size:
            value = time_us / size
            return f"{value:.{max(0, 2 - len(str(int(abs(value)))) + 1)}f} {unit}"
    return f"{time_us:.1f} us" if abs(time_us) < 100 else f"{time_us:.0f} us"
