"""The trace report on the fields that torch.profiler writes for NCCL's kernels, counted by hand.

`nccl_fields.json` was put together from the names and fields that are documented and in use for such traces; it is no
recording. That the installed PyTorch writes fields of these names is looked up in its library. One rank of two ran a
step of a root with one layer under FSDP2:

    stream 7          [unpack 160.5-165.5]  [root 170.5-200.5]  [layer 250.5-450.5] [backward 460.5-760.5]
    stream 24  [AG root 100.5-160.5]  [AG layers.0 166.5-246.5]                         [RS layers.0 770.5-900.5]

It also has what a reader must pass over: flow events, the GPU's copy of annotations, `record_param_comms`, rows without
numbers for process and thread, a synchronization that lasts as long as the step.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from fsdp_passes.errors import TraceFileError
from fsdp_passes.inspect.trace import trace_report

PATH = Path(__file__).parent.parent / "data" / "nccl_fields.json"


def test_collectives_have_unit_kind_bytes_and_exposed_time() -> None:
    report = trace_report([PATH])
    found = [(c.unit, c.phase, c.kind, c.num_bytes, c.duration_us, c.exposed_us) for c in report.collectives]
    assert found == [
        ("root", "forward", "all_gather", 40960 * 2, 60, 60),  # "Out msg nelems" of BFloat16
        ("layers.0", "forward", "all_gather", 1048576 * 2, 80, 50),  # the root computes for 30 meanwhile
        ("layers.0", "backward", "reduce_scatter", 1048576 * 4, 130, 130),  # "In msg nelems" of Float
    ]


def test_the_step_adds_up() -> None:
    (step,) = trace_report([PATH]).steps
    assert (step.rank, step.step, step.wall_us) == (0, 2, 800)  # from the first kernel to the last one's end
    assert (step.compute_us, step.exposed_us, step.copies_us, step.idle_us) == (530, 240, 5, 25)


def test_the_longest_exposed_part_gives_the_reason() -> None:
    """The layer's gather starts 4 us before the root computes, which is not why 46 us behind that are exposed."""
    gather = trace_report([PATH]).collectives[1]
    assert gather.hidden_behind == {("root", "forward"): 30}
    assert gather.reason == (
        "starts 34.0 us before root (forward) stops computing, too late to be hidden; layers.0 (forward) waits for it"
    )


def test_a_ranks_step_in_two_files_is_refused() -> None:
    with pytest.raises(TraceFileError, match=r"found step 2 of rank 0, which .*nccl_fields\.json has too\."):
        trace_report([PATH, PATH])


def test_the_installed_pytorch_writes_these_fields() -> None:
    """The names that a reader depends on are constants of the profiler's library."""
    (library,) = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
    text = PATH.read_text()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
        for field in (
            "Collective name",
            "In msg nelems",
            "Out msg nelems",
            "Group size",
            "dtype",
            "record_param_comms",
        ):
            assert f'"{field}"' in text
            assert code.find(field.encode() + b"\0") >= 0, field
