"""verify.py: each invariant, broken by a schedule made for it, is reported with the bucket's label."""

from __future__ import annotations

import dataclasses
import re
import warnings

import pytest
import torch

from fsdp_passes.errors import ScheduleError, ScheduleWarning
from fsdp_passes.schedule import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Bucket, ScheduleEvent
from fsdp_passes.verify import check_schedule, verify_schedule
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import transformer_record


def gather(unit: int, index: int | None = None, num_params: int = 1, reshard: bool = True) -> Bucket:
    return Bucket(ALL_GATHER, unit if index is None else index, unit, num_params, 100 + unit, torch.float32, reshard)


def schedule(text: str, buckets: dict[str, Bucket] | None = None) -> list[ScheduleEvent]:
    """Events from words: `g0.start`, `g0.wait`, `mm(g0,g1)` and `add(g0)` that read, `open` and `close`.

    g<i> is the all-gather of unit i and r<i> its reduce-scatter; `buckets` says otherwise.
    """
    known = {f"g{unit}": gather(unit) for unit in range(5)}
    known |= {f"r{unit}": Bucket(REDUCE_SCATTER, unit, unit, 1, 100, torch.float32) for unit in range(5)}
    known |= buckets or {}
    events = []
    for index, word in enumerate(text.split()):
        if match := re.fullmatch(r"(\w+)\.(start|wait)", word):
            events.append(ScheduleEvent(match[2], f"{match[2]}_{index}", known[match[1]]))
        elif match := re.fullmatch(r"(mm|add)\((.*)\)", word):
            reads = tuple(known[name] for name in match[2].split(",") if name)
            events.append(ScheduleEvent("compute", f"{match[1]}_{index}", reads=reads, is_heavy=match[1] == "mm"))
        else:
            kind = {"open": "region_begin", "close": "region_end"}[word]
            events.append(ScheduleEvent(kind, f"region_{index}", text="forward_compute" if word == "open" else ""))
    return events


GOOD = "g0.start g1.start g0.wait mm(g0) g2.start g1.wait mm(g1) g2.wait mm(g2)"


# ---- good schedules --------------------------------------------------------------------------------------------------


def test_a_good_schedule_passes_and_its_figures_are_reported() -> None:
    report = verify_schedule(schedule(GOOD), prefetch=1, where="here")
    assert report.problems == report.losses == ()
    (exception,) = report.exceptions
    assert (
        exception == "all_gather 0 (unit 0): nothing in this graph hides it, it is the first and nothing runs before it"
    )
    assert report.max_unsharded_units == 2
    assert report.max_unsharded_bytes == 101 + 102


def test_a_first_gather_that_compute_hides_is_no_exception() -> None:
    report = check_schedule(schedule("g0.start mm() g0.wait mm(g0)"), prefetch=1)
    assert (report.problems, report.losses, report.exceptions) == ((), (), ())
    assert (report.max_unsharded_units, report.max_unsharded_bytes) == (1, 100)


def test_two_units_ahead_hold_three_units() -> None:
    text = "g0.start g1.start g2.start g0.wait mm(g0) g3.start g1.wait mm(g1) g2.wait mm(g2) g3.wait mm(g3)"
    report = verify_schedule(schedule(text), prefetch=2, where="here")
    assert (report.max_unsharded_units, report.max_unsharded_bytes) == (3, 101 + 102 + 103)
    assert report.losses == ()


def test_kept_units_do_not_count() -> None:
    text = "g0.start g1.start g0.wait mm(g0) g2.start g1.wait mm(g1) g2.wait mm(g2) mm(g0)"
    report = verify_schedule(schedule(text, {"g0": gather(0, reshard=False)}), prefetch=1, where="here")
    assert report.losses == ()
    assert (report.max_unsharded_units, report.max_unsharded_bytes) == (2, 101 + 102)


def test_both_dtypes_of_a_unit_count_as_one_unit() -> None:
    half = Bucket(ALL_GATHER, 9, 0, 1, 50, torch.bfloat16)
    report = check_schedule(schedule("g0.start h.start g0.wait h.wait mm(g0) add(h)", {"h": half}), prefetch=1)
    assert report.problems == report.losses == ()
    assert (report.max_unsharded_units, report.max_unsharded_bytes) == (1, 150)


def test_reductions_and_an_empty_schedule_pass() -> None:
    assert check_schedule([], prefetch=1).problems == ()
    report = verify_schedule(schedule("mm() r1.start mm() r0.start r1.wait r0.wait"), prefetch=1, where="here")
    assert (report.losses, report.max_unsharded_units) == ((), 0)


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_schedules_of_a_real_model_pass(prefetch: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        forward, backward = transformer_record(prefetch=prefetch).graphs
    layer_bytes = (8 * 8 + 8) * 4
    for graph in (forward, backward):
        assert graph.report is not None
        assert graph.report.max_unsharded_units == min(3, 1 + prefetch)
        assert graph.report.max_unsharded_bytes == min(3, 1 + prefetch) * layer_bytes


@pytest.mark.usefixtures("eight_fake_ranks")
def test_verify_false_checks_nothing() -> None:
    assert [graph.report for graph in transformer_record(verify=False).graphs] == [None, None]


# ---- what makes results wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("g0.start mm()", "all_gather 0 (unit 0): is started but never awaited"),
        ("r0.start mm()", "reduce_scatter 0 (unit 0): is started but never awaited"),
        ("g0.wait mm(g0)", "all_gather 0 (unit 0): expected one start, found 0"),
        ("g0.start g0.start g0.wait mm(g0)", "all_gather 0 (unit 0): expected one start, found 2"),
        ("g0.wait g0.start mm(g0)", "all_gather 0 (unit 0): is awaited before it is started"),
        ("g0.start add(g0) g0.wait", "all_gather 0 (unit 0): add_1 reads a result before the last wait of its bucket"),
        ("g0.start g0.wait mm() g0.wait mm(g0)", "all_gather 0 (unit 0): mm_2 runs between the waits of one bucket"),
        ("r1.start r1.wait add() r1.wait", "reduce_scatter 1 (unit 1): add_2 runs between the waits of one bucket"),
        ("close", "region_0: closes a region, and none is open"),
        ("open open", "region_1: forward_compute opens inside forward_compute; compute regions do not nest"),
        ("open mm()", "the region forward_compute is never closed"),
    ],
)  # fmt: skip
def test_a_schedule_that_computes_wrong_values_is_refused(text: str, problem: str) -> None:
    buckets = {"g0": gather(0, num_params=2), "r1": Bucket(REDUCE_SCATTER, 1, 1, 2, 100, torch.float32)}
    report = check_schedule(schedule(text, buckets), prefetch=1)
    assert report.problems == (problem,)
    with pytest.raises(ScheduleError, match=r"^the forward graph: expected a schedule that") as raised:
        verify_schedule(schedule(text, buckets), prefetch=1, where="the forward graph")
    assert raised.value.problems == (problem,)


def test_a_read_between_two_waits_breaks_both_rules() -> None:
    events = schedule("g0.start g0.wait add(g0) g0.wait mm(g0)", {"g0": gather(0, num_params=2)})
    assert check_schedule(events, prefetch=1).problems == (
        "all_gather 0 (unit 0): add_2 reads a result before the last wait of its bucket",
        "all_gather 0 (unit 0): add_2 runs between the waits of one bucket",
    )


def test_a_result_without_a_wait_of_its_own_is_refused() -> None:
    """A grouped collective has one wait per result, a packed one has one: two waits for three results is neither."""
    events = schedule("g0.start g0.wait g0.wait mm(g0)", {"g0": gather(0, num_params=3)})
    (problem,) = check_schedule(events, prefetch=1).problems
    assert problem.startswith("all_gather 0 (unit 0): expected")


def test_every_problem_is_listed() -> None:
    with pytest.raises(ScheduleError) as raised:
        verify_schedule(schedule("g0.start r0.start open"), prefetch=1, where="here")
    assert len(raised.value.problems) == 3
    assert str(raised.value).count("\n  - ") == 3


# ---- what costs speed or memory --------------------------------------------------------------------------------------


LOSSES = [
    (
        "g0.start g0.wait mm(g0) g1.start g1.wait mm(g1)",
        "all_gather 1 (unit 1): starts behind the first use of unit 0, expected before it",
    ),
    (
        "g0.start g1.start g0.wait mm(g0) g1.wait mm(g0) mm(g1)",
        "all_gather 1 (unit 1): is awaited before the compute of unit 0, expected behind it",
    ),
    (
        "g0.start g1.start g2.start g0.wait mm(g0) g1.wait mm(g1) g2.wait mm(g2)",
        "units 0, 1, 2 are unsharded at once, expected at most 2",
    ),
    (
        "g0.start again.start g0.wait again.wait mm(g0,again)",
        "all_gather 7 (unit 0): the unit already has all_gather 0 (unit 0) in torch.float32",
    ),
    (
        "mm() r0.start r0again.start r0.wait r0again.wait",
        "reduce_scatter 7 (unit 0): the unit already has reduce_scatter 0 (unit 0) in torch.float32",
    ),
]
AGAIN = {"again": gather(0, index=7), "r0again": Bucket(REDUCE_SCATTER, 7, 0, 1, 100, torch.float32)}


@pytest.mark.parametrize(("text", "loss"), LOSSES)
def test_a_schedule_that_hides_less_is_reported_and_runs(text: str, loss: str) -> None:
    with pytest.warns(ScheduleWarning, match="^the graph: expected communication to be hidden") as caught:
        report = verify_schedule(schedule(text, AGAIN), prefetch=1, where="the graph")
    assert report.problems == ()
    assert report.losses == (loss,)
    assert str(caught[0].message).endswith(f"\n  - {loss}")


def test_with_prefetch_two_the_start_is_expected_two_units_ahead() -> None:
    text = "g0.start g1.start g0.wait mm(g0) g2.start g1.wait mm(g1) g2.wait mm(g2)"
    assert check_schedule(schedule(text), prefetch=2).losses == (
        "all_gather 2 (unit 2): starts behind the first use of unit 0, expected before it",
    )


# ---- exceptions, each with its reason --------------------------------------------------------------------------------


def test_two_units_in_one_kernel_cannot_hide_each_other() -> None:
    report = check_schedule(schedule("g0.start g1.start g0.wait g1.wait mm(g0,g1)"), prefetch=1)
    assert report.problems == report.losses == ()
    assert "all_gather 1 (unit 1): not hidden by unit 0, one kernel reads both" in report.exceptions


def test_a_unit_that_is_read_again_later_stays_unsharded_and_says_so() -> None:
    text = "g0.start g1.start g0.wait mm(g0) g2.start g1.wait mm(g1) mm(g0) g2.wait mm(g2)"
    report = check_schedule(schedule(text), prefetch=1)
    assert "unit 0: stays unsharded beside the next unit, it is read again later" in report.exceptions


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("r0.start r0.wait a0.start a0.wait", None),
        ("r0.start a0.start r0.wait a0.wait", "reduce_scatter 0 (unit 0): {start} reads a result before the last wait"),
        ("r0.start r0.wait a0.start", "all_reduce 0 (unit 0): is started but never awaited"),
    ],
)
def test_an_all_reduce_starts_behind_the_wait_of_what_it_sends_on(text: str, problem: str | None) -> None:
    reduced = Bucket(REDUCE_SCATTER, 0, 0, 1, 100, torch.float32)
    events = [
        dataclasses.replace(event, reads=(reduced,))
        if event.kind == "start" and event.bucket.kind == ALL_REDUCE
        else event
        for event in schedule(text, {"a0": Bucket(ALL_REDUCE, 0, 0, 1, 50, torch.float32, num_ranks=2)})
    ]
    problems = check_schedule(events, prefetch=1).problems
    assert [one.split(" of its bucket")[0] for one in problems] == (
        [] if problem is None else [problem.format(start="start_1")]
    )
