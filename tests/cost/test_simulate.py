"""simulate.py: timelines by hand, and against a simulation in ticks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_passes.cost.simulate import TimedStep, simulate


def compute(us: int, name: str = "mm", unit: str = "") -> TimedStep:
    return TimedStep("compute", name, unit, "forward", us)


def start(key: str, us: int, row: str = "communication") -> TimedStep:
    return TimedStep("start", f"start {key}", key, "forward", us, key, row, "all_gather", 8)


def wait(key: str) -> TimedStep:
    return TimedStep("wait", f"wait {key}", key, "forward", key=key)


def test_a_schedule_by_hand() -> None:
    """
    compute        |          mm 0 (20)     |  idle  | mm 1 (5)
    communication  | a (10)   | b (30)               |
    """
    spans, times = simulate([start("a", 10), start("b", 30), wait("a"), compute(20), wait("b"), compute(5, "mm 1")])
    assert [(span.name, span.start_us, span.end_us, span.exposed_us) for span in spans] == [
        ("start a", 0, 10, 10),
        ("mm", 10, 30, 0),
        ("start b", 10, 40, 10),
        ("mm 1", 40, 45, 0),
    ]
    assert times == [0, 10, 10, 30, 40, 45]


@pytest.mark.parametrize(
    ("steps", "reasons"),
    [
        ([start("a", 10), wait("a"), compute(5)], ["first of the graph: nothing computes before it"]),
        ([compute(5), start("a", 10), wait("a")], ["last of the graph: nothing is left to compute"]),
        ([compute(5), start("a", 10), wait("a"), compute(5)], ["nothing computes between its start and its wait"]),
        (
            [compute(5), start("a", 10), compute(4), wait("a"), compute(5)],
            ["takes 10 us, the compute meanwhile only 4 us"],
        ),
        (
            [compute(5), start("a", 30), start("b", 10), compute(32), wait("b"), wait("a")],
            ["", "queued 30 us behind the all_gather of a"],
        ),
        (
            [compute(5), start("a", 30), start("b", 10), compute(5), wait("b"), wait("a")],
            [
                "a collective behind it on its row is awaited",
                "queued 30 us behind the all_gather of a, then takes 10 us; the compute meanwhile only 5 us",
            ],
        ),
        ([start("a", 10), compute(10), wait("a")], [""]),
    ],
)
def test_the_reason_of_an_exposed_collective(steps: list[TimedStep], reasons: list[str]) -> None:
    spans, _ = simulate(steps)
    assert [span.reason for span in spans if span.row != "compute"] == reasons


def test_two_rows_do_not_queue_for_each_other() -> None:
    one, _ = simulate([start("a", 10), start("b", 10), wait("b")])
    two, _ = simulate([start("a", 10), start("b", 10, "second row"), wait("b")])
    assert max(span.end_us for span in one) == 20
    assert max(span.end_us for span in two) == 10


def test_a_wait_without_a_start_is_refused() -> None:
    with pytest.raises(ValueError, match="wait a: expected a start before the wait"):
        simulate([wait("a")])


# ---- against brute force ---------------------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> list[TimedStep]:
    """Any order of compute, starts on one or two rows, and a wait for each start somewhere behind it."""
    steps: list[TimedStep] = []
    rows = draw(st.sampled_from([("communication",), ("communication", "second row")]))
    waiting: list[str] = []
    for index in range(draw(st.integers(0, 12))):
        what = draw(st.sampled_from(["compute", "start", "wait"]))
        if what == "compute":
            steps.append(compute(draw(st.integers(0, 6)), f"mm {index}"))
        elif what == "start":
            steps.append(start(str(index), draw(st.integers(0, 6)), draw(st.sampled_from(rows))))
            waiting.append(str(index))
        elif waiting:
            steps.append(wait(waiting.pop(draw(st.integers(0, len(waiting) - 1)))))
    return [*steps, *[wait(key) for key in waiting]]


def by_ticks(steps: list[TimedStep]) -> tuple[dict[str, tuple[int, int]], list[bool]]:
    """One microsecond after the other: when each step ran, and for each tick whether the compute row stood still.

    Shares nothing with `simulate`: in each tick every row looks whether it may go on.
    """
    ran: dict[str, tuple[int, int]] = {}
    queues: dict[str, list[TimedStep]] = {}
    current: dict[str, tuple[TimedStep, int]] = {}
    finished: set[str] = set()
    pending, running, tick = list(steps), None, 0
    idle: list[bool] = []
    while True:
        moved = True
        while moved:  # everything that takes no time, until nothing changes
            moved = False
            for row in {**queues, **current}:
                if row in current and current[row][1] <= tick:
                    step, _ = current.pop(row)
                    finished.add(step.key)
                    moved = True
                if row not in current and queues.get(row):
                    step = queues[row].pop(0)
                    current[row] = (step, tick + int(step.duration_us))
                    ran[step.name] = (tick, tick + int(step.duration_us))
                    moved = True
            if running is not None and running <= tick:
                running, moved = None, True
            if running is None and pending:
                step = pending[0]
                if step.kind == "compute":
                    running = tick + int(step.duration_us)
                    ran[step.name] = (tick, running)
                elif step.kind == "start":
                    queues.setdefault(step.row, []).append(step)
                elif step.key not in finished:
                    continue
                pending.pop(0)
                moved = True
        if not pending and running is None and not current:
            return ran, idle
        idle.append(running is None and bool(pending))
        tick += 1


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_it_agrees_with_a_simulation_in_ticks(steps: list[TimedStep]) -> None:
    spans, _ = simulate(steps)
    expected, idle = by_ticks(steps)
    for span in spans:
        assert (span.start_us, span.end_us) == expected[span.name]
        begin, end = expected[span.name]
        if span.row != "compute":
            assert span.exposed_us == sum(idle[begin:end])
            assert bool(span.reason) == (span.exposed_us > 0)
    collectives = [span for span in spans if span.row != "compute"]
    assert len(collectives) == sum(step.kind == "start" for step in steps)
