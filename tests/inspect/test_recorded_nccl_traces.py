"""The trace report on profiles of NCCL ranks, against numbers that were counted by hand in the files' own JSON.

Recorded with torch 2.11 by `tests/gpu/test_nccl_trace.py`: two ranks share one H200, a Transformer of three layers of
width 256 in fp32, steps 0 and 1, under FSDP2, the eager fallback and the compiled backend. All times are microseconds
from the begin of step 1's first kernel, as the trace has them. The host of the compiled run's rank 1 was late at every
collective, so that rank 0's kernels wait in it.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from fsdp_passes.inspect.trace import TraceReport, trace_report
from fsdp_passes.inspect.trace_measure import MeasuredCollective

DATA = Path(__file__).parent.parent / "data"
LAYER = 4 * (2 * 512 + 768 * 256 + 256 * 257 + 1024 * 257 + 256 * 1025)  # fp32: norms, qkv, proj, up, down
BIASES = 4 * (256 + 256 + 1024 + 256)  # norm1's and norm2's weights are read in the backward, these are not
EMBED, HEAD = 4 * 64 * 256, 4 * (64 * 256 + 2 * 256)  # the head with the last norm
ROOT = EMBED + HEAD

# Begin, duration, unit, and the bytes: four times the larger of "In msg nelems" and "Out msg nelems".
FSDP2 = [
    ("all_gather", "root", "forward", 363.072, 5.535, ROOT),
    ("all_gather", "layers.0", "forward", 2332.670, 27.584, LAYER),
    ("all_gather", "layers.1", "forward", 5756.317, 29.920, LAYER),
    ("all_gather", "layers.2", "forward", 9227.995, 29.312, LAYER),
    ("all_gather", "layers.2", "backward", 13593.944, 29.825, LAYER),
    ("all_gather", "layers.1", "backward", 15336.824, 30.400, LAYER),
    ("reduce_scatter", "layers.2", "backward", 18153.686, 30.560, LAYER),
    ("all_gather", "layers.0", "backward", 19672.886, 30.112, LAYER),
    ("reduce_scatter", "layers.1", "backward", 22692.820, 32.032, LAYER),
    ("reduce_scatter", "layers.0", "backward", 26489.843, 30.431, LAYER),
    ("reduce_scatter", "root", "backward", 27657.170, 8.672, ROOT),
]
EAGER = [
    ("all_gather", "root", "forward", 0.0, 9.056, ROOT),
    ("all_gather", "layers.0", "forward", 1502.463, 61.600, LAYER),
    ("all_gather", "layers.1", "forward", 3444.062, 62.944, LAYER),
    ("all_gather", "layers.2", "forward", 7024.795, 64.896, LAYER),
    ("all_gather", "layers.2", "backward", 14057.877, 64.353, LAYER),
    ("all_gather", "layers.1", "backward", 15028.661, 65.248, LAYER),
    ("all_gather", "layers.0", "backward", 18666.194, 64.960, LAYER),
    ("reduce_scatter", "layers.2", "backward", 19287.410, 65.056, LAYER),
    ("reduce_scatter", "layers.1", "backward", 23073.039, 70.912, LAYER),
    ("reduce_scatter", "layers.0", "backward", 27066.860, 67.328, LAYER),
    ("reduce_scatter", "root", "backward", 28099.979, 10.624, ROOT),
]
# The root has two buckets in each direction: the embedding, and the last norm with the head.
COMPILED = [
    ("all_gather", "root", "forward", 0.0, 2957.759, EMBED),
    ("all_gather", "layers.0", "forward", 2959.807, 571.968, LAYER),
    ("all_gather", "layers.1", "forward", 3532.991, 751.071, LAYER),
    ("all_gather", "layers.2", "forward", 4286.270, 1977.120, LAYER),
    ("all_gather", "root", "forward", 6267.197, 1679.456, HEAD),
    ("all_gather", "layers.2", "backward", 7978.141, 3611.422, LAYER - BIASES - 4 * 256),
    ("all_gather", "layers.1", "backward", 11607.931, 746.144, LAYER - BIASES - 4 * 256),
    ("reduce_scatter", "root", "backward", 12355.963, 227.360, HEAD),
    ("all_gather", "layers.0", "backward", 12584.603, 2170.751, LAYER - BIASES - 4 * 256),
    ("reduce_scatter", "layers.2", "backward", 14757.050, 375.264, LAYER),
    ("reduce_scatter", "layers.1", "backward", 15194.650, 2115.647, LAYER),
    ("reduce_scatter", "layers.0", "backward", 17939.705, 1785.215, LAYER),
    ("reduce_scatter", "root", "backward", 19726.616, 863.744, EMBED),
]
# The same collectives on rank 1, which nobody keeps waiting: their durations alone.
COMPILED_RANK_1_US = [
    5.023, 61.152, 64.032, 64.800, 8.448, 45.600, 47.456, 10.048, 49.536, 68.608, 69.280, 69.120, 6.272
]  # fmt: skip


@pytest.fixture(scope="module")
def fsdp2() -> TraceReport:
    return trace_report([DATA / "nccl_fsdp2.rank0.json.gz"])


@pytest.fixture(scope="module")
def eager() -> TraceReport:
    return trace_report([DATA / "nccl_eager.rank0.json.gz"])


@pytest.fixture(scope="module")
def compiled() -> TraceReport:
    return trace_report([DATA / f"nccl_compiled.rank{rank}.json.gz" for rank in (0, 1)])


def of_step_1(report: TraceReport, rank: int = 0) -> list[MeasuredCollective]:
    return [one for one in report.collectives if (one.rank, one.step) == (rank, 1)]


@pytest.mark.parametrize(("name", "expected"), [("fsdp2", FSDP2), ("eager", EAGER), ("compiled", COMPILED)])
def test_collectives_have_kind_unit_phase_bytes_begin_and_duration(
    name: str, expected: list[tuple[str, str, str, float, float, int]], request: pytest.FixtureRequest
) -> None:
    found = of_step_1(request.getfixturevalue(name))
    assert [(c.kind, c.unit, c.phase, c.num_bytes) for c in found] == [(*row[:3], row[5]) for row in expected]
    for one, (_, _, _, start, duration, _) in zip(found, expected, strict=True):
        assert one.start_us == pytest.approx(start, abs=0.002)
        assert one.duration_us == pytest.approx(duration, abs=0.002)


@pytest.mark.parametrize(("name", "num_ranks"), [("fsdp2", 1), ("eager", 1), ("compiled", 2)])
def test_every_step_adds_up(name: str, num_ranks: int, request: pytest.FixtureRequest) -> None:
    report: TraceReport = request.getfixturevalue(name)
    assert [(step.rank, step.step) for step in report.steps] == [(r, s) for r in range(num_ranks) for s in (0, 1)]
    for step in report.steps:
        parts = step.compute_us + step.exposed_us + step.copies_us + step.idle_us
        assert parts == pytest.approx(step.wall_us, abs=0.01)
        of_step = [c for c in report.collectives if (c.rank, c.step) == (step.rank, step.step)]
        assert step.exposed_us == pytest.approx(sum(c.exposed_us for c in of_step), abs=0.01)
    for one in report.collectives:
        assert one.hidden_us + one.exposed_us == pytest.approx(one.duration_us, abs=0.01)
        assert bool(one.reason) == (one.exposed_us > 0)


def test_fsdp2s_step_is_split_as_its_kernels_are(fsdp2: TraceReport) -> None:
    """Step 1 on the GPU takes 27870.001; no two of its kernels overlap. Those of FSDP2's own annotations: packing
    100.960, unpacking 31.838 and what its reduction launches 74.176; the others 1317.723."""
    step = fsdp2.steps[1]
    assert step.wall_us == pytest.approx(27870.001, abs=0.01)
    assert step.copies_us == pytest.approx(100.960 + 31.838 + 74.176, abs=0.01)
    assert step.compute_us == pytest.approx(1317.723, abs=0.01)
    assert step.communication_us == step.exposed_us == pytest.approx(sum(row[4] for row in FSDP2), abs=0.01)


def test_compiled_code_hides_its_gathers_behind_the_layer_before_by_the_sum_of_its_kernels(
    compiled: TraceReport,
) -> None:
    """layers.0 runs nine kernels while layers.1 is gathered, one after the other."""
    (gather,) = (c for c in of_step_1(compiled) if (c.kind, c.unit, c.phase) == ("all_gather", "layers.1", "forward"))
    kernels = 2.688 + 18.240 + 16.256 + 11.616 + 2.528 + 24.448 + 3.392 + 22.496 + 4.256
    assert gather.hidden_us == pytest.approx(kernels, abs=0.01)
    assert gather.hidden_behind == {("layers.0", "forward"): pytest.approx(kernels, abs=0.01)}
    # Summed in the same way over the kernels that run within each of step 1's collectives.
    hidden = [0, 0, 105.921, 111.202, 104.351, 20.769, 238.689, 0, 270.756, 0, 208.448, 4.544, 0]
    assert [c.hidden_us for c in of_step_1(compiled)] == pytest.approx(hidden, abs=0.02)


def test_the_rank_that_comes_first_waits_in_its_collectives(compiled: TraceReport) -> None:
    assert [c.duration_us for c in of_step_1(compiled, rank=1)] == pytest.approx(COMPILED_RANK_1_US, abs=0.002)
    for one, row, on_rank_1 in zip(of_step_1(compiled), COMPILED, COMPILED_RANK_1_US, strict=True):
        assert one.waiting_us == pytest.approx(row[4] - on_rank_1, abs=0.01)
    assert all(one.waiting_us == 0 for one in of_step_1(compiled, rank=1))


def test_what_compiled_code_runs_in_no_region_is_the_accumulation_of_gradients() -> None:
    """One addition for each of the 37 parameters and the fill of the loss's gradient: 51.872 in step 0, 51.809 in 1."""
    report = trace_report([DATA / "nccl_compiled.rank0.json.gz"])
    (nobodys,) = (unit for unit in report.units if not unit.unit)
    assert nobodys.compute_us == pytest.approx((51.872 + 51.809) / 2, abs=0.005)  # the clock has 1 ns
    assert nobodys.num_collectives == 0


def test_units_stand_in_the_order_in_which_they_compute(
    fsdp2: TraceReport, eager: TraceReport, compiled: TraceReport
) -> None:
    """FSDP2 and the fallback run the root's embedding first; Inductor fuses it into the first layer's norm. The
    backward begins with the root in all of them."""
    layers = ["layers.0", "layers.1", "layers.2"]
    for report, forward in (
        (fsdp2, ["root", *layers]),
        (eager, ["root", *layers]),
        (compiled, [*layers, "root"]),
    ):
        order: dict[str, list[str]] = defaultdict(list)
        for unit in report.units:
            order[unit.phase].append(unit.unit)
        assert order == {"forward": forward, "backward": ["root", *reversed(layers)], "": [""]}


def test_a_collective_that_waited_for_another_in_its_stream_is_told_so(compiled: TraceReport) -> None:
    """layers.2's reduction is launched at 12327.2, its stream gathers layers.0 from 12584.603 to 14755.354, and it runs
    from 14757.050 on: what layers.1 computed before that is not what it waited for."""
    reasons = {(c.kind, c.unit, c.num_bytes): c.reason for c in of_step_1(compiled) if c.phase == "backward"}
    assert reasons["reduce_scatter", "layers.2", LAYER] == (
        "queued behind the all_gather of layers.0 (backward); layers.0 (backward) computes next"
    )
    assert reasons["reduce_scatter", "root", EMBED] == (
        "queued behind the reduce_scatter of layers.0 (backward); no unit computes behind it"
    )


def test_the_text_on_one_rank_of_compiled_code() -> None:
    assert_expected_inline(
        trace_report([DATA / "nccl_compiled.rank0.json.gz"]).text(3),
        """\
FSDP trace report: 1 rank, steps 0 to 1

  rank  step time  = compute  + exposed  + copies   + idle  communication  hidden
  -------------------------------------------------------------------------------
  0       20.9 ms    1.19 ms    15.9 ms    0.0 us  3.82 ms        16.8 ms   5.7 %

Per unit, mean of a step of a rank:
  unit       phase     compute     idle  communication   hidden  exposed  collectives    MiB
  ------------------------------------------------------------------------------------------
  layers.0   forward    103 us   691 us         487 us        -   487 us            1   3.01
  layers.1   forward    104 us   441 us         607 us  53.0 us   554 us            1   3.01
  layers.2   forward    103 us   209 us        1.42 ms  57.4 us  1.36 ms            1   3.01
  root       forward   16.9 us   308 us        3.07 ms  80.2 us  2.99 ms            2   0.13
  root       backward  27.7 us   494 us        1.07 ms        -  1.07 ms            2   0.13
  layers.2   backward   252 us   1.6 us        3.00 ms  21.9 us  2.98 ms            2   6.01
  layers.1   backward   270 us   3.1 us        2.92 ms   469 us  2.45 ms            2   6.01
  layers.0   backward   261 us   323 us        4.23 ms   274 us  3.96 ms            2   6.01
  (no unit)            51.8 us  1.35 ms              -        -        -            0      -
  total                1.19 ms  3.82 ms        16.8 ms   955 us  15.9 ms           13  27.32

Exposed collectives (3 of 11), most exposed first, mean of a step of a rank:
  all_gather of root (forward): 2.99 ms exposed of 3.07 ms
      worst on rank 0, step 1, 2.96 ms: no unit computes before it; layers.0 (forward) computes next
      hidden behind the compute of layers.2 (forward) 80.2 us
  all_gather of layers.2 (backward): 2.61 ms exposed of 2.63 ms
      worst on rank 0, step 1, 3.59 ms: starts 273 us before root (backward) stops computing, too late to be
        hidden; layers.2 (backward) waits for it
      hidden behind the compute of root (backward) 21.9 us
  reduce_scatter of layers.0 (backward): 2.05 ms exposed of 2.05 ms
      worst on rank 0, step 0, 2.31 ms: starts 4.5 us before root (backward) stops computing, queued behind the
        reduce_scatter of layers.1 (backward); no unit computes behind it
      hidden behind the compute of root (backward) 3.5 us, layers.0 (backward) 0.5 us
""",
    )
