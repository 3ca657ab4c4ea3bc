"""The trace report on profiles of real NCCL ranks, of FSDP2 and of this library, against the model's own sizes."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_passes.inspect.trace import TraceReport, trace_report
from tests.models import Transformer, sharded_call, token_batches
from tests.ranks import RankPool

pytestmark = pytest.mark.gpu
SIZES = {"dim": 256, "hidden": 1024, "layers": 3, "vocab": 64}
UNITS = ("layers.0", "layers.1", "layers.2")
NUM_STEPS = 2


def record(system: str, folder: str) -> None:
    """Profile `NUM_STEPS` steps behind three warm ones into `folder`/`system`.rank`r`.json.gz."""
    torch.manual_seed(0)
    model = Transformer(**SIZES).cuda()
    call = sharded_call(model, system)
    (batch,) = [tuple(t.cuda() for t in pair) for pair in token_batches(1, 8, 128)]
    for _ in range(3):
        call(*batch).backward()
    torch.cuda.synchronize()
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for step in range(NUM_STEPS):
            with torch.profiler.record_function(f"ProfilerStep#{step}"):
                call(*batch).backward()
                torch.cuda.synchronize()
    profiler.export_chrome_trace(str(Path(folder) / f"{system}.rank{dist.get_rank()}.json.gz"))
    dist.barrier()


@pytest.fixture(scope="module", params=["fsdp2", "eager", "compiled"])
def recorded(
    request: pytest.FixtureRequest, two_nccl_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, TraceReport]:
    """The name of a system and the report on its two ranks. Files stay in `FSDP_PASSES_TRACES`."""
    folder = Path(os.environ.get("FSDP_PASSES_TRACES") or tmp_path_factory.mktemp("traces"))
    folder.mkdir(parents=True, exist_ok=True)
    two_nccl_ranks.run("tests.gpu.test_nccl_trace:record", system=request.param, folder=str(folder))
    return request.param, trace_report(sorted(folder.glob(f"{request.param}.rank*.json.gz")))


def unit_bytes(skip: tuple[str, ...] = ()) -> dict[str, int]:
    """Bytes of each unit's parameters, without those whose names end so."""
    model = Transformer(**SIZES)
    found: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        if name.endswith(skip):
            continue
        unit = next((unit for unit in UNITS if name.startswith(f"{unit}.")), "root")
        found[unit] += parameter.numel() * parameter.element_size()
    return dict(found)


def test_every_collective_is_found_with_its_unit_phase_and_bytes(recorded: tuple[str, TraceReport]) -> None:
    system, report = recorded
    sizes = unit_bytes()
    expected = {("all_gather", unit, "forward"): size for unit, size in sizes.items()}
    # The root keeps its parameters; a compiled backward gathers what it reads: of the biases only those of the norms,
    # whose outputs it computes again.
    read = unit_bytes(skip=("proj.bias", "up.bias", "down.bias")) if system == "compiled" else sizes
    expected |= {("all_gather", unit, "backward"): size for unit, size in read.items() if unit != "root"}
    expected |= {("reduce_scatter", unit, "backward"): size for unit, size in sizes.items()}
    for rank in (0, 1):
        for step in range(NUM_STEPS):
            found: dict[tuple[str, str, str], int] = defaultdict(int)
            for one in report.collectives:
                if (one.rank, one.step) == (rank, step):
                    found[one.kind, one.unit, one.phase] += one.num_bytes
            assert dict(found) == expected, (rank, step)


def test_the_gathers_run_in_the_order_of_the_layers(recorded: tuple[str, TraceReport]) -> None:
    _, report = recorded
    for step in range(NUM_STEPS):
        gathers = [
            (one.unit, one.phase)
            for one in report.collectives
            if (one.rank, one.step, one.kind) == (0, step, "all_gather") and one.unit != "root"
        ]
        forward = [(unit, "forward") for unit in UNITS]
        assert gathers == forward + [(unit, "backward") for unit in reversed(UNITS)]


def test_every_step_adds_up(recorded: tuple[str, TraceReport]) -> None:
    system, report = recorded
    assert report.ranks == (0, 1)
    assert [(step.rank, step.step) for step in report.steps] == [(r, s) for r in (0, 1) for s in range(NUM_STEPS)]
    for step in report.steps:
        parts = step.compute_us + step.exposed_us + step.copies_us + step.idle_us
        assert parts == pytest.approx(step.wall_us, abs=0.1)
        assert step.compute_us > 0
    for one in report.collectives:
        assert one.hidden_us + one.exposed_us == pytest.approx(one.duration_us, abs=0.1)
    print(f"{system}: {report.total}")
