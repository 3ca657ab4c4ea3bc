"""Unions of intervals, against counting points."""

from __future__ import annotations

import random

import pytest

from fsdp_passes.inspect.intervals import IntervalUnion


def points(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit cells of whole-numbered intervals."""
    return {cell for begin, end in intervals for cell in range(int(begin), int(end))}


@pytest.mark.parametrize("seed", range(20))
def test_every_question_is_answered_as_by_counting_cells(seed: int) -> None:
    generator = random.Random(seed)

    def some_intervals() -> list[tuple[float, float]]:
        begins = [generator.randrange(40) for _ in range(generator.randrange(9))]
        return [(float(begin), float(begin + generator.randrange(8))) for begin in begins]

    one, other = some_intervals(), some_intervals()
    union, cells = IntervalUnion(one), points(one)
    assert points(list(union)) == cells
    assert points(list(union.minus(IntervalUnion(other)))) == cells - points(other)
    for begin in range(0, 50, 7):
        for end in range(begin, 50, 3):
            window = set(range(begin, end))
            assert union.covered(begin, end) == len(cells & window)
            assert points(union.parts(begin, end)) == cells & window
            assert points(union.gaps(begin, end)) == window - cells


def test_touching_intervals_become_one_and_empty_ones_vanish() -> None:
    assert list(IntervalUnion([(3.0, 4.0), (1.0, 3.0), (7.0, 7.0)])) == [(1.0, 4.0)]
    assert IntervalUnion([]).gaps(2.0, 5.0) == [(2.0, 5.0)]
