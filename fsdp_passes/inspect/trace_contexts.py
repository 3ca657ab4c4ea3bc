"""Which unit a thread worked for at a time, from the annotations that it opened and closed."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict

from fsdp_passes.inspect.trace_events import Names, Table
from fsdp_passes.inspect.trace_names import (
    COMMUNICATION,
    COMPUTE,
    ENTER,
    LEAVE,
    RESET,
    Meaning,
    meaning_of,
    step_number,
)

NOTHING = Meaning("", "", "")


@dataclasses.dataclass
class _Lane:
    """From `times[i]` on, `meanings[i]` holds."""

    times: list[float] = dataclasses.field(default_factory=list)
    meanings: list[Meaning] = dataclasses.field(default_factory=list)


class Contexts:
    """What holds on each lane at each time.

    An annotation that marks compute or communication holds for what is inside it. FSDP2 marks only its hooks: behind
    `FSDP::pre_forward (u)` the unit u computes, until `FSDP::post_forward (u)` begins; then the unit around it goes on.
    In the backward the same with `pre_backward` and `post_backward_…`.
    """

    def __init__(self, annotations: Table, names: Names) -> None:
        by_lane: dict[int, list[int]] = defaultdict(list)
        for index in annotations.in_order():
            name = names.all[annotations.names[index]]
            if meaning_of(name) is not None or step_number(name) is not None:
                by_lane[annotations.lanes[index]].append(index)
        self._lanes = {lane: _sweep(annotations, names, indices) for lane, indices in by_lane.items()}
        # Unit -> (end, phase) of each stretch of its compute, on whatever lane, in order of end.
        self._phases: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for lane in self._lanes.values():
            for end, meaning in zip([*lane.times[1:], float("inf")], lane.meanings, strict=True):
                if meaning.role == COMPUTE and meaning.phase:
                    self._phases[meaning.unit].append((end, meaning.phase))
        for stretches in self._phases.values():
            stretches.sort()

    def at(self, lane: int, time: float) -> Meaning:
        """The innermost meaning that holds; `NOTHING` when none does."""
        found = self._lanes.get(lane)
        index = bisect_right(found.times, time) - 1 if found is not None else -1
        return found.meanings[index] if found is not None and index >= 0 else NOTHING

    def next_compute(self, lane: int, time: float) -> Meaning:
        """The first meaning with a phase that holds on the lane from `time` on, `NOTHING` if none follows."""
        found = self._lanes.get(lane, _Lane())
        for index in range(max(0, bisect_right(found.times, time) - 1), len(found.times)):
            if found.meanings[index].role == COMPUTE and found.meanings[index].phase:
                return found.meanings[index]
        return NOTHING

    def phase_served(self, unit: str, lane: int, time: float) -> str:
        """The phase that a gather of `unit` serves which starts on `lane` at `time`: that in which the unit computes
        next, since a backward's first gathers start at the end of the forward; "" when nothing follows."""
        stretches = self._phases.get(unit, [])
        index = bisect_right(stretches, time, key=lambda stretch: stretch[0])
        return stretches[index][1] if index < len(stretches) else self.next_compute(lane, time).phase

    def compute_segments(self, lane: int) -> list[tuple[float, Meaning]]:
        """(begin, meaning) of each stretch of compute on a lane whose unit is known."""
        found = self._lanes.get(lane, _Lane())
        pairs = zip(found.times, found.meanings, strict=True)
        return [(time, meaning) for time, meaning in pairs if meaning.role == COMPUTE and meaning.unit]


def _sweep(annotations: Table, names: Names, indices: list[int]) -> _Lane:
    """Walk over the begins and ends of one lane's annotations, which are properly nested."""
    lane = _Lane()
    open_annotations: list[tuple[float, Meaning]] = []
    computing: list[Meaning] = []  # units between their hooks, innermost last

    def note(time: float) -> None:
        meaning = _innermost([meaning for _, meaning in open_annotations], computing)
        if lane.times and lane.times[-1] == time:
            lane.meanings[-1] = meaning
        elif not lane.meanings or lane.meanings[-1] != meaning:
            lane.times.append(time)
            lane.meanings.append(meaning)

    def close_until(time: float) -> None:
        while open_annotations and open_annotations[-1][0] <= time:
            end, meaning = open_annotations.pop()
            if meaning.role == ENTER:
                computing.append(Meaning(COMPUTE, meaning.unit, meaning.phase))
            note(end)

    for index in indices:
        begin = annotations.begins[index]
        close_until(begin)
        meaning = meaning_of(names.all[annotations.names[index]]) or Meaning(RESET, "", "")  # a step begins
        if meaning.role == RESET:
            computing[:] = [one for one in computing if meaning.phase and one.phase != meaning.phase]
        elif meaning.role == LEAVE or (meaning.role == COMMUNICATION and meaning.phase == "backward"):
            # post_backward_reduce comes behind the unit's compute; a prefetched unit is not computing yet.
            computing[:] = [one for one in computing if (one.unit, one.phase) != (meaning.unit, meaning.phase)]
        open_annotations.append((annotations.ends[index], meaning))
        note(begin)
    close_until(float("inf"))
    return lane


def _innermost(open_meanings: list[Meaning], computing: list[Meaning]) -> Meaning:
    """The innermost open annotation that says something; inside a hook, the hook's own unit."""
    phase = next((meaning.phase for meaning in reversed(open_meanings) if meaning.phase), "")
    for meaning in reversed(open_meanings):
        if meaning.role == COMMUNICATION:
            return dataclasses.replace(meaning, phase=meaning.phase or phase)
        if meaning.role in (COMPUTE, ENTER, LEAVE):
            return Meaning(COMPUTE, meaning.unit, meaning.phase)
    return computing[-1] if computing else NOTHING
