"""What names in traces mean."""

from __future__ import annotations

import pytest

from fsdp_passes.inspect.trace_names import (
    Meaning,
    collective_kind,
    is_collective_kernel,
    is_cpu_work,
    meaning_of,
    num_bytes_of,
    step_number,
)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("FSDP:layers.0:forward_compute", Meaning("compute", "layers.0", "forward")),
        ("FSDP:root:backward_compute", Meaning("compute", "root", "backward")),
        ("FSDP:a:b:all_gather", Meaning("communication", "a:b", "")),
        ("FSDP:layers.0:reduce_scatter", Meaning("communication", "layers.0", "backward")),
        ("FSDP::all_gather (layers.0)", Meaning("communication", "layers.0", "")),
        ("FSDP::all_gather", Meaning("communication", "root", "")),
        ("FSDP::all_gather_copy_out (norm, output)", Meaning("communication", "norm, output", "")),
        ("FSDP::backward_prefetch for layers.2", Meaning("communication", "layers.2", "backward")),
        ("FSDP::pre_forward (layers.0)", Meaning("enter", "layers.0", "forward")),
        ("FSDP::post_forward", Meaning("leave", "root", "forward")),
        ("FSDP::pre_backward (x)", Meaning("enter", "x", "backward")),
        ("FSDP::post_backward_accumulate (x)", Meaning("leave", "x", "backward")),
        ("FSDP::post_backward_reduce (x)", Meaning("communication", "x", "backward")),
        ("FSDP::post_backward_rs_wait ()", Meaning("communication", "root", "backward")),
        ("FSDP::root_pre_forward", Meaning("reset", "", "")),
        ("FSDP::root_post_backward_callback", Meaning("reset", "", "backward")),
        ("Optimizer.step#AdamW.step", Meaning("compute", "", "")),
        ("ProfilerStep#3", None),
        ("FSDP: something else", None),
    ],
)
def test_annotations(name: str, meaning: Meaning | None) -> None:
    assert meaning_of(name) == meaning


def test_step_numbers() -> None:
    assert step_number("ProfilerStep#12") == 12
    assert step_number("FSDP::all_gather") is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWorkElem)", "reduce_scatter"),
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(...)", "all_reduce"),
        ("ncclDevKernel_SendRecv(...)", "other"),
        ("gloo:all_gather", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("c10d::allgather_into_tensor_coalesced_", "all_gather"),
    ],
)
def test_kinds_of_collectives(name: str, kind: str) -> None:
    assert collective_kind(name) == kind
    assert is_collective_kernel(name) == name.startswith("nccl")


def test_what_computes_on_the_cpu() -> None:
    assert is_cpu_work("aten::mm")
    assert is_cpu_work("fsdp::chunk_cat")
    for name in (
        "c10d::allreduce_",
        "_c10d_functional::wait_tensor",
        "autograd::engine::evaluate_function: X",
        "Frame",
    ):
        assert not is_cpu_work(name)


@pytest.mark.parametrize(
    ("arguments", "num_bytes"),
    [
        ({"In msg nelems": 4, "Out msg nelems": 8, "dtype": "BFloat16"}, 16),
        ({"In msg nelems": 8, "Out msg nelems": 4, "dtype": "Float"}, 32),
        ({"In msg nelems": 8, "Out msg nelems": 4, "dtype": "Float8_e4m3fn"}, 8),
        ({"In msg nelems": 8, "Out msg nelems": 4, "dtype": "float32"}, 32),
        ({"In msg nelems": 8, "dtype": "Unheard"}, 0),
        ({"Input Dims": [[2, 8], [8], []], "Input type": ["float", "float", ""]}, 64),
        ({"Input Dims": [[[2, 8], [3]], []], "Input type": ["TensorList", ""]}, 0),
        ({}, 0),
    ],
)
def test_bytes_of_a_collective(arguments: dict[str, object], num_bytes: int) -> None:
    assert num_bytes_of(arguments) == num_bytes
