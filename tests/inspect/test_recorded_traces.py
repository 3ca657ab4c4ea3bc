"""The trace report on traces that were recorded, against numbers that were counted by hand.

Two gloo ranks, a model of embed, two layers and head, steps 1 and 2, under FSDP2 (`fsdp2_…`) and under this library's
compiled backend (`compiled_…`). All times are microseconds from the begin of ProfilerStep#2 on rank 0, as the trace has
them.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fsdp_passes.inspect.trace import TraceReport, trace_report

DATA = Path(__file__).parent.parent / "data"


def report_of(name: str) -> TraceReport:
    return trace_report([DATA / f"{name}_two_ranks.json.gz", DATA / f"{name}_two_ranks.rank1.json.gz"])


@pytest.fixture(scope="module")
def fsdp2() -> TraceReport:
    return report_of("fsdp2")


@pytest.fixture(scope="module")
def compiled() -> TraceReport:
    return report_of("compiled")


# Begin and duration of each gloo event; the unit from the FSDP:: annotation around the c10d call before it; bytes are
# those of fp32 parameters: embed and head 2 * (256 * 256 + 256), a layer 2 * 256 * 1024 + 1024 + 256.
FSDP2_STEP_2 = [
    ("all_gather", "root", "forward", 402.747, 5972.133, 526336),
    ("all_gather", "layers.0", "forward", 8140.438, 1612.250, 2102272),
    ("all_gather", "layers.1", "forward", 17727.719, 2975.281, 2102272),
    ("all_gather", "layers.1", "backward", 29884.871, 1953.846, 2102272),
    ("all_gather", "layers.0", "backward", 34711.515, 1144.117, 2102272),
    ("reduce_scatter", "layers.1", "backward", 51481.094, 5316.031, 2102272),
    ("reduce_scatter", "layers.0", "backward", 72483.519, 1292.426, 2102272),
    ("reduce_scatter", "root", "backward", 75483.545, 764.723, 526336),
]


def test_fsdp2s_collectives_are_found_with_unit_phase_and_bytes(fsdp2: TraceReport) -> None:
    found = [one for one in fsdp2.collectives if (one.rank, one.step) == (0, 2)]
    assert [(c.kind, c.unit, c.phase, c.num_bytes) for c in found] == [(*row[:3], row[5]) for row in FSDP2_STEP_2]
    for one, (_, _, _, start, duration, _) in zip(found, FSDP2_STEP_2, strict=True):
        assert one.start_us == pytest.approx(start, abs=0.01)
        assert one.duration_us == pytest.approx(duration, abs=0.01)


def test_fsdp2_on_the_cpu_hides_nothing(fsdp2: TraceReport) -> None:
    """Its thread waits for each collective before it goes on, as the annotations show."""
    (step,) = (step for step in fsdp2.steps if (step.rank, step.step) == (0, 2))
    assert step.wall_us == pytest.approx(77335.961, abs=0.01)
    assert step.communication_us == pytest.approx(sum(row[4] for row in FSDP2_STEP_2), abs=0.1)
    assert step.exposed_us == pytest.approx(step.communication_us, abs=0.1)


def test_fsdp2s_compute_belongs_to_the_unit_between_its_hooks(fsdp2: TraceReport) -> None:
    """The large products of layers.0, forward: 10470.521 to 13423.338 and 13613.831 to 16403.346."""
    spans = [span for span in fsdp2.timelines[0].spans if span.row == "compute"]
    products = [span for span in spans if span.duration_us > 2000 and span.phase == "forward"]
    assert [span.unit for span in products] == ["layers.0", "layers.0", "layers.1", "layers.1"]
    assert fsdp2.timelines[0].title == "rank 0, step 2"
    assert products[0].start_us == pytest.approx(10440, abs=60)  # addmm, inside aten::linear


def test_every_step_of_every_rank_adds_up(fsdp2: TraceReport, compiled: TraceReport) -> None:
    for report in (fsdp2, compiled):
        assert [(step.rank, step.step) for step in report.steps] == [(0, 1), (0, 2), (1, 1), (1, 2)]
        for step in report.steps:
            parts = step.compute_us + step.exposed_us + step.copies_us + step.idle_us
            assert parts == pytest.approx(step.wall_us, abs=0.01)
        for one in report.collectives:
            assert one.hidden_us + one.exposed_us == pytest.approx(one.duration_us, abs=0.01)
            assert bool(one.reason) == (one.exposed_us > 0)


def test_a_gather_of_compiled_code_hides_behind_the_region_of_the_unit_before_it(compiled: TraceReport) -> None:
    """gloo gathers layers.1 from 7372.689 to 15085.903; the region of layers.0 begins at 12913.844, so 2172.059 are
    hidden; before that the thread waits for layers.0's own gather."""
    (gather,) = (
        one
        for one in compiled.collectives
        if (one.rank, one.step, one.kind, one.unit, one.phase) == (0, 2, "all_gather", "layers.1", "forward")
    )
    assert gather.duration_us == pytest.approx(15085.903 - 7372.689, abs=0.01)
    assert gather.hidden_behind["layers.0", "forward"] == pytest.approx(15085.903 - 12913.844, abs=0.01)
    assert gather.exposed_us == pytest.approx(12913.844 - 7372.689, abs=5)  # less some views of a microsecond


def test_compiled_code_runs_one_gather_a_unit_and_direction_and_one_reduction_a_parameter(
    compiled: TraceReport,
) -> None:
    """gloo reduces each of a unit's four tensors by itself; the root keeps its parameters for the backward."""
    found = [(c.kind, c.unit, c.phase) for c in compiled.collectives if (c.rank, c.step) == (0, 2)]
    assert found[:5] == [
        ("all_gather", "root", "forward"),
        ("all_gather", "layers.0", "forward"),
        ("all_gather", "layers.1", "forward"),
        ("all_gather", "layers.1", "backward"),
        ("all_gather", "layers.0", "backward"),
    ]
    reductions = [("reduce_scatter", unit, "backward") for unit in ("layers.1", "layers.0", "root") for _ in range(4)]
    assert found[5:] == reductions


def test_a_reduction_of_compiled_code_is_hidden_by_its_own_units_other_gradients(compiled: TraceReport) -> None:
    """Region of layers.1: 48736.365 to 77150.626; its reductions run from 69453.807 to 75361.003."""
    reductions = [
        c for c in compiled.collectives if (c.rank, c.step, c.kind, c.unit) == (0, 2, "reduce_scatter", "layers.1")
    ]
    assert sum(one.duration_us for one in reductions) == pytest.approx(4807.527 + 4403.648 + 1263.433 + 1085.949)
    assert sum(one.exposed_us for one in reductions) == 0


def test_memory_is_known_where_the_trace_has_shapes(fsdp2: TraceReport) -> None:
    """The root's parameters stay; one layer's come and go, and in the backward the next one's are there already."""
    peak = max(point.num_bytes for point in fsdp2.timelines[0].memory)
    assert peak == 526336 + 2 * 2102272
    assert fsdp2.timelines[0].memory[-1].num_bytes == 0


def test_the_recorded_files_say_nothing_of_the_machine_that_recorded_them() -> None:
    for path in DATA.glob("*.json.gz"):
        text = gzip.decompress(path.read_bytes()).decode()
        for word in ("host_name", "traceName", "/home", "/work", "/tmp", "/root"):
            assert word not in text
