"""Points in time as disjoint intervals: what covers what, and for how long."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

Interval = tuple[float, float]


class IntervalUnion:
    """The points in time that any of `intervals` (begin, end) covers, as disjoint intervals in order.

    Built in one pass over the sorted intervals and held in flat arrays, since a trace may have a million kernels.
    Every question about a stretch of time then takes O(log n). `is_sorted`: they come in order of their begins, so
    no copy is made to sort them.
    """

    def __init__(self, intervals: Iterable[Interval], *, is_sorted: bool = False) -> None:
        self.begins = array("d")
        self.ends = array("d")
        for begin, end in intervals if is_sorted else sorted(intervals):
            if end <= begin:
                continue
            if self.ends and begin <= self.ends[-1]:
                self.ends[-1] = max(end, self.ends[-1])
            else:
                self.begins.append(begin)
                self.ends.append(end)
        self._covered_before = array("d", [0.0])  # in the intervals before the i-th
        for begin, end in self:
            self._covered_before.append(self._covered_before[-1] + end - begin)

    def __iter__(self) -> Iterator[Interval]:
        return iter(zip(self.begins, self.ends, strict=True))

    def __len__(self) -> int:
        return len(self.begins)

    def _covered_until(self, time: float) -> float:
        index = bisect_right(self.begins, time)
        if index == 0:
            return 0.0
        return self._covered_before[index - 1] + min(time, self.ends[index - 1]) - self.begins[index - 1]

    def covered(self, begin: float, end: float) -> float:
        """How much of [begin, end] is covered."""
        return max(0.0, self._covered_until(end) - self._covered_until(begin))

    def parts(self, begin: float, end: float) -> list[Interval]:
        """The covered parts of [begin, end], in order."""
        index = bisect_right(self.ends, begin)
        found = []
        while index < len(self.begins) and self.begins[index] < end:
            found.append((max(begin, self.begins[index]), min(end, self.ends[index])))
            index += 1
        return found

    def gaps(self, begin: float, end: float) -> list[Interval]:
        """The parts of [begin, end] that nothing covers, in order."""
        found = []
        for covered_begin, covered_end in self.parts(begin, end):
            if covered_begin > begin:
                found.append((begin, covered_begin))
            begin = covered_end
        if end > begin:
            found.append((begin, end))
        return found

    def minus(self, other: IntervalUnion) -> IntervalUnion:
        """What this covers and `other` does not."""
        return IntervalUnion(gap for begin, end in self for gap in other.gaps(begin, end))
