"""A short soak; `tools/soak.py --steps 1000` is the long one."""

from __future__ import annotations

import pytest

from soak import make_events
from tests.ranks import RankPool


@pytest.mark.parametrize(("way", "steps"), [("fallback", 80), ("aot_eager", 40)])
def test_losses_follow_the_reference_through_random_events_and_nothing_grows(way: str, steps: int) -> None:
    events = make_events(steps, seed=1)
    assert {event.kind for event in events} == {"train", "eval", "accumulate"}
    assert any("backward" in event.raises for event in events)
    pool = RankPool(2)  # of its own: what other tests have left in a process and in its store may grow meanwhile
    try:
        reports = pool.run("soak:soak", steps=steps, seed=1, way=way)
    finally:
        pool.close()
    assert reports[0].num_given_up == sum(bool(event.raises) for event in events) > 0
    assert {report.end["queued"] for report in reports} == {0}
