"""The trace report on hand-made GPU traces, to the microsecond."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from fsdp_passes.errors import OptionValueError
from fsdp_passes.inspect.trace import TraceReport, trace_report
from tests.inspect.traces import ALL_GATHER, AUTOGRAD, COMMUNICATION, REDUCE_SCATTER, GpuTrace, two_layers


def report_of(trace: GpuTrace, tmp_path: Path) -> TraceReport:
    return trace_report([trace.write(tmp_path / "rank0.json.gz")])


def seen(report: TraceReport) -> list[tuple[str, str, str, float, float, float]]:
    return [(c.kind, c.unit, c.phase, c.start_us, c.hidden_us, c.exposed_us) for c in report.collectives]


def test_every_microsecond_of_a_step_is_accounted_for(tmp_path: Path) -> None:
    """The docstring of `two_layers` draws the step: 810 us from 1000 to 1810."""
    report = report_of(two_layers(), tmp_path)
    (step,) = report.steps
    assert (step.rank, step.step, step.wall_us) == (0, 3, 810)
    assert step.compute_us == 100 + 200 + 200
    assert step.communication_us == 40 + 140 + 100
    assert step.hidden_us == 90  # the layer's gather from 1060 to 1150
    assert step.exposed_us == 190
    assert step.copies_us == 10 + 10
    assert step.idle_us == 100  # 1400 to 1500
    assert seen(report) == [
        ("all_gather", "root", "forward", 0, 0, 40),
        ("all_gather", "layers.0", "forward", 60, 90, 50),
        ("reduce_scatter", "layers.0", "backward", 710, 0, 100),
    ]
    assert [c.num_bytes for c in report.collectives] == [8192, 16384, 32768]
    assert [c.hidden_behind for c in report.collectives] == [{}, {("root", "forward"): 90}, {}]


def test_units_get_their_compute_and_the_idle_time_before_it(tmp_path: Path) -> None:
    report = report_of(two_layers(), tmp_path)
    rows = {(unit.unit, unit.phase): unit for unit in report.units}
    assert {owner: row.compute_us for owner, row in rows.items()} == {
        ("root", "forward"): 100,
        ("layers.0", "forward"): 200,
        ("layers.0", "backward"): 200,
    }
    assert rows["layers.0", "backward"].idle_us == 100
    assert (report.total.communication_us, report.total.exposed_us, report.total.idle_us) == (280, 190, 100)


def test_reasons_name_the_compute_around_the_exposed_part(tmp_path: Path) -> None:
    report = report_of(two_layers(), tmp_path)
    assert [c.reason for c in report.collectives] == [
        "no unit computes before it; root (forward) waits for it",
        "starts 90.0 us before root (forward) stops computing, too late to be hidden; layers.0 (forward) waits for it",
        "starts only when layers.0 (backward) has computed; no unit computes behind it",
    ]


def test_the_text(tmp_path: Path) -> None:
    assert_expected_inline(
        report_of(two_layers(), tmp_path).text(2),
        """\
FSDP trace report: 1 rank, step 3

  rank  step time  = compute  + exposed  + copies  + idle  communication  hidden
  ------------------------------------------------------------------------------
  0        810 us     500 us     190 us   20.0 us  100 us         280 us  32.1 %

Per unit, mean of a step of a rank:
  unit      phase     compute    idle  communication   hidden  exposed  collectives   MiB
  ---------------------------------------------------------------------------------------
  root      forward    100 us       -        40.0 us        -  40.0 us            1  0.01
  layers.0  forward    200 us       -         140 us  90.0 us  50.0 us            1  0.02
  layers.0  backward   200 us  100 us         100 us        -   100 us            1  0.03
  total                500 us  100 us         280 us  90.0 us   190 us            3  0.05

Exposed collectives (2 of 3), most exposed first, mean of a step of a rank:
  reduce_scatter of layers.0 (backward): 100 us exposed of 100 us
      worst on rank 0, step 3, 100 us: starts only when layers.0 (backward) has computed; no unit computes
        behind it
  all_gather of layers.0 (forward): 50.0 us exposed of 140 us
      worst on rank 0, step 3, 50.0 us: starts 90.0 us before root (forward) stops computing, too late to be
        hidden; layers.0 (forward) waits for it
      hidden behind the compute of root (forward) 90.0 us
""",
    )


def test_the_text_of_several_ranks_tells_who_waited(tmp_path: Path) -> None:
    """Rank 1 comes 80 us late to the reduce-scatter, so 80 of rank 0's 100 us are waiting."""
    paths = [two_layers(rank, 80.0 * rank).write(tmp_path / f"rank{rank}.json") for rank in range(2)]
    report = trace_report(paths)
    waited = {(c.rank, c.kind, c.unit): c.waiting_us for c in report.collectives}
    assert waited[0, "reduce_scatter", "layers.0"] == 80
    assert sum(waited.values()) == 80
    assert report.total.waiting_us == 40  # mean of the ranks
    assert report.ranks == (0, 1)
    assert_expected_inline(
        report.text(),
        """\
FSDP trace report: 2 ranks, step 3

  rank  step time  = compute  + exposed  + copies  + idle  communication  hidden
  ------------------------------------------------------------------------------
  0        810 us     500 us     190 us   20.0 us  100 us         280 us  32.1 %
  1        810 us     500 us     110 us   20.0 us  180 us         200 us  45.0 %
  mean     810 us     500 us     150 us   20.0 us  140 us         240 us  37.5 %

Per unit, mean of a step of a rank:
  unit       phase     compute     idle  communication   hidden  exposed  waiting  collectives   MiB
  --------------------------------------------------------------------------------------------------
  root       forward    100 us        -        40.0 us        -  40.0 us        -            1  0.01
  layers.0   forward    200 us        -         140 us  90.0 us  50.0 us        -            1  0.02
  layers.0   backward   200 us   100 us        60.0 us        -  60.0 us  40.0 us            1  0.03
  (no unit)                  -  40.0 us              -        -        -        -            0     -
  total                 500 us   140 us         240 us  90.0 us   150 us  40.0 us            3  0.05

Exposed collectives, most exposed first, mean of a step of a rank:
  reduce_scatter of layers.0 (backward): 60.0 us exposed of 60.0 us, 40.0 us of waiting for a slower rank
      worst on rank 0, step 3, 100 us: starts only when layers.0 (backward) has computed; no unit computes
        behind it
  all_gather of layers.0 (forward): 50.0 us exposed of 140 us
      worst on rank 0, step 3, 50.0 us: starts 90.0 us before root (forward) stops computing, too late to be
        hidden; layers.0 (forward) waits for it
      hidden behind the compute of root (forward) 90.0 us
  all_gather of root (forward): 40.0 us exposed of 40.0 us
      worst on rank 0, step 3, 40.0 us: no unit computes before it; root (forward) waits for it
""",
    )


def test_the_timeline_shows_the_step_from_its_begin(tmp_path: Path) -> None:
    (timeline,) = report_of(two_layers(), tmp_path).timelines
    assert timeline.title == "rank 0, step 3"
    assert timeline.is_measured
    assert (timeline.total_us, timeline.exposed_us) == (810, 190)
    assert [(s.row, s.unit, s.start_us, s.duration_us) for s in timeline.spans if s.row != "communication"] == [
        ("copies", "root", 40, 10),
        ("compute", "root", 50, 100),
        ("compute", "layers.0", 200, 200),
        ("compute", "layers.0", 500, 200),
        ("copies", "layers.0", 700, 10),
    ]
    # Gathered from its gather's begin to its unit's last use.
    assert [(p.time_us, p.num_bytes) for p in timeline.memory] == [
        (0, 8192), (60, 8192 + 16384), (150, 16384), (700, 0)
    ]  # fmt: skip


def test_the_steps_of_a_trace_follow_the_launches(tmp_path: Path) -> None:
    """The second step's work is launched before the first one's has ended, and belongs to the second."""
    trace = GpuTrace()
    for number in (5, 6, 7):
        base = 100.0 * number
        trace.annotate(f"ProfilerStep#{number}", base, base + 100)
        trace.annotate("FSDP:layers.0:forward_compute", base + 5, base + 30)
        trace.kernel("gemm", base + 90, base + 150, launch=base + 10)
        trace.collective(ALL_GATHER, base + 140, base + 170, launch=base + 50)
    report = report_of(trace, tmp_path)
    assert [(step.step, step.wall_us) for step in report.steps] == [(5, 100), (6, 100), (7, 80)]
    assert [(c.step, c.start_us, c.hidden_us, c.exposed_us) for c in report.collectives] == [
        (5, 50, 10, 20), (6, 50, 10, 20), (7, 50, 10, 20)
    ]  # fmt: skip
    assert report.timelines[0].title == "rank 0, step 5"


def test_kernels_without_a_launch_take_the_annotation_of_the_gpus_own_row(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.kernel("gemm", 10, 50, launch=None)
    trace._add("gpu_user_annotation", "FSDP:layers.4:forward_compute", 5, 60, 0, 7)
    trace.collective(ALL_GATHER, 20, 80, launch=None)
    trace._add("gpu_user_annotation", "FSDP::all_gather (layers.5)", 20, 80, 0, COMMUNICATION)
    report = report_of(trace, tmp_path)
    assert seen(report) == [("all_gather", "layers.5", "", 10, 30, 30)]
    assert report.collectives[0].hidden_behind == {("layers.4", "forward"): 30}


def test_collectives_of_compiled_code_get_their_units_from_the_order_of_the_regions(tmp_path: Path) -> None:
    """Compiled code marks compute only: gathers start one unit ahead, the root is gathered once."""
    trace = GpuTrace()
    trace.annotate("ProfilerStep#1", 0, 1000)
    for at in (10, 12, 30, 130):  # root, layers.0 | layers.1 during layers.0, then backward: layers.1
        trace.collective(ALL_GATHER, at * 10, at * 10 + 15, launch=at)
    for unit, phase, begin in [
        ("root", "forward", 20), ("layers.0", "forward", 35), ("layers.1", "forward", 45), ("root", "forward", 55),
        ("root", "backward", 140), ("layers.1", "backward", 150), ("layers.0", "backward", 170),
    ]:  # fmt: skip
        trace.annotate(f"FSDP:{unit}:{phase}_compute", begin, begin + 8)
        trace.kernel("triton", begin * 10, begin * 10 + 50, launch=begin + 1)
    trace.collective(ALL_GATHER, 1490, 1510, launch=149)  # layers.0
    trace.collective(REDUCE_SCATTER, 1600, 1650, launch=157)  # inside layers.1's region
    trace.collective(REDUCE_SCATTER, 1800, 1850, launch=180)  # behind layers.0's
    assert [(c.kind, c.unit, c.phase) for c in report_of(trace, tmp_path).collectives] == [
        ("all_gather", "root", "forward"),
        ("all_gather", "layers.0", "forward"),
        ("all_gather", "layers.1", "forward"),
        ("all_gather", "layers.1", "backward"),
        ("all_gather", "layers.0", "backward"),
        ("reduce_scatter", "layers.1", "backward"),
        ("reduce_scatter", "layers.0", "backward"),
    ]


def test_a_gather_at_the_end_of_the_forward_that_the_backward_reads_counts_there(tmp_path: Path) -> None:
    """A compiled forward starts the first gathers of its backward, which runs on another thread."""
    trace = GpuTrace()
    trace.annotate("FSDP:layers.0:all_gather", 10, 11)
    trace.collective(ALL_GATHER, 100, 150, launch=10.5)
    trace.annotate("FSDP:layers.0:forward_compute", 20, 28)
    trace.kernel("triton", 200, 250, launch=21)
    trace.annotate("FSDP:layers.0:all_gather", 30, 31)
    trace.collective(ALL_GATHER, 300, 350, launch=30.5)
    trace.annotate("FSDP:root:forward_compute", 40, 48)
    trace.kernel("triton", 400, 450, launch=41)
    trace.annotate("FSDP:layers.0:backward_compute", 60, 68, thread=AUTOGRAD)
    trace.kernel("triton", 600, 650, launch=61, thread=AUTOGRAD)
    assert [(c.unit, c.phase) for c in report_of(trace, tmp_path).collectives] == [
        ("layers.0", "forward"),
        ("layers.0", "backward"),
    ]


def test_nothing_is_guessed_where_gathers_and_units_do_not_match(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.annotate("FSDP:layers.0:forward_compute", 20, 30)
    trace.annotate("FSDP:layers.1:forward_compute", 40, 50)
    trace.kernel("gemm", 500, 600, launch=25)
    for at in (10, 11, 12):
        trace.collective(ALL_GATHER, at * 10, at * 10 + 5, launch=at)
    assert [(c.unit, c.phase) for c in report_of(trace, tmp_path).collectives] == [("", "forward")] * 3


def test_two_streams_are_two_rows_and_a_foreign_collective_belongs_to_the_compute_around_it(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.annotate("FSDP::pre_forward (layers.0)", 1, 20)
    trace.annotate("FSDP::all_gather (layers.0)", 2, 10)
    trace.collective(ALL_GATHER, 100, 150, launch=3)
    trace.kernel("gemm", 150, 200, launch=30)
    trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 200, 230, launch=40, stream=33)  # tensor parallelism
    trace.kernel("gemm", 230, 260, launch=50)
    report = report_of(trace, tmp_path)
    assert [(c.kind, c.unit, c.phase) for c in report.collectives] == [
        ("all_gather", "layers.0", "forward"),
        ("all_reduce", "layers.0", "forward"),
    ]
    assert {s.row for s in report.timelines[0].spans} == {"compute", "communication 1", "communication 2"}
    assert report.collectives[1].reason == "layers.0 (forward) pauses while it runs"


def test_kernels_that_overlap_on_two_streams_hide_a_collective_once(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.kernel("gemm", 0, 100, launch=None)
    trace.kernel("gemm", 10, 20, launch=None, stream=8)
    trace.kernel("gemm", 50, 120, launch=None, stream=8)
    trace.collective(ALL_GATHER, 60, 150, launch=None)
    report = report_of(trace, tmp_path)
    assert [(c.hidden_us, c.exposed_us) for c in report.collectives] == [(60, 30)]
    assert report.collectives[0].hidden_behind == {("", ""): 100}  # 40 on one stream, 60 on the other
    assert report.steps[0].compute_us == 120


def test_copies_to_the_host_are_no_compute(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.kernel("gemm", 0, 10, launch=None)
    trace._add("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 10, 40, 0, 7)
    assert report_of(trace, tmp_path).steps[0].copies_us == 30


def test_a_step_of_many_kernels_is_drawn_with_few_bars(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.annotate("FSDP:layers.0:forward_compute", 0, 10000)
    for index in range(2000):
        trace.kernel("gemm" if index % 2 else "norm", 10.0 * index, 10.0 * index + 9, launch=1.0 + index)
    report = report_of(trace, tmp_path)
    (bar,) = report.timelines[0].spans
    assert (bar.name, bar.start_us, bar.duration_us) == ("norm and 1999 more", 0, 19999)
    assert report.steps[0].compute_us == 18000
    assert report.timelines[0].compute_us == pytest.approx(18000)  # the pauses between the kernels are none of it


def test_json_holds_what_the_report_holds(tmp_path: Path) -> None:
    report = report_of(two_layers(), tmp_path)
    report.to_json(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert list(data) == ["schema", "steps", "units", "total", "collectives"]
    assert data["schema"] == "fsdp_passes.trace_report/1"
    assert set(data["steps"][0]) == {
        "rank", "step", "wall_us", "compute_us", "communication_us", "exposed_us", "hidden_us", "copies_us", "idle_us"
    }  # fmt: skip
    assert set(data["units"][0]) == set(data["total"]) == {
        "unit", "phase", "compute_us", "idle_us", "communication_us", "hidden_us", "exposed_us", "waiting_us",
        "num_collectives", "num_bytes",
    }  # fmt: skip
    assert data["collectives"][1] == {
        "rank": 0, "step": 3, "unit": "layers.0", "phase": "forward", "kind": "all_gather", "name": ALL_GATHER,
        "start_us": 60, "duration_us": 140, "hidden_us": 90, "exposed_us": 50, "num_bytes": 16384, "waiting_us": 0,
        "hidden_behind": [{"unit": "root", "phase": "forward", "time_us": 90}],
        "reason": report.collectives[1].reason,
    }  # fmt: skip


def test_a_trace_without_collectives_says_so(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.kernel("gemm", 0, 10, launch=None, thread=AUTOGRAD)
    assert "No collective ran: is this the trace of a distributed run?" in report_of(trace, tmp_path).text()


def test_a_hidden_collective_needs_no_reason(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.kernel("gemm", 0, 100, launch=None)
    trace.collective(ALL_GATHER, 10, 90, launch=None)
    report = report_of(trace, tmp_path)
    assert report.exposed_collectives == ()
    assert "Every collective is hidden behind compute." in report.text()


def test_no_path_at_all_is_refused() -> None:
    with pytest.raises(OptionValueError, match="paths: expected at least one trace file"):
        trace_report([])


@pytest.mark.parametrize(("gap", "ends", "is_queued"), [(2, 103, True), (40, 90, True), (40, 130, False)])
def test_a_collective_is_queued_when_the_one_before_it_in_its_stream_ends_last(
    gap: float, ends: float, is_queued: bool, tmp_path: Path
) -> None:
    """Both are launched at once; `gap` passes between them, and the compute that the second might need `ends` before or
    within it. A kernel of a unit comes behind."""
    trace = GpuTrace()
    trace.annotate("FSDP:layers.0:forward_compute", 20, 40)
    trace.annotate("FSDP:layers.1:forward_compute", 50, 60)
    trace.annotate("FSDP:layers.1:all_gather", 41, 49)
    trace.kernel("gemm", 60, ends, launch=30)
    trace.annotate("FSDP:layers.0:all_gather", 1, 19)
    trace.collective(ALL_GATHER, 50, 101, launch=10)
    trace.collective(ALL_GATHER, 101 + gap, 200, launch=45)
    trace.kernel("gemm", 210, 250, launch=55)
    report = report_of(trace, tmp_path)
    reason = report.collectives[1].reason
    assert ("queued behind the all_gather of layers.0" in reason) is is_queued
    assert reason.endswith("; layers.1 (forward) waits for it")


def test_a_marked_step_0_is_a_step_and_no_marks_are_none(tmp_path: Path) -> None:
    for annotation, number, text in [("ProfilerStep#0", 0, "1 rank, step 0\n"), ("x", -1, "No step is marked")]:
        trace = GpuTrace()
        trace.annotate(annotation, 0, 500)
        trace.kernel("gemm", 10, 20, launch=5)
        report = report_of(trace, tmp_path)
        assert [step.step for step in report.steps] == [number]
        assert text in report.text()
        assert (", step 0" in report.timelines[0].title) == (number == 0)
