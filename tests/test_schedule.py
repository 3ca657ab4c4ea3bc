"""schedule.py: what is read of a graph, and that Inductor's kernels tell the same story."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fsdp_passes.passes.annotate_regions import annotate_regions
from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.passes.schedule_one_layer_ahead import schedule_one_layer_ahead
from fsdp_passes.schedule import (
    Bucket,
    ScheduleEvent,
    bucket_of,
    events_from_graph,
    gathered_reads,
    is_heavy,
    role_of,
)
from tests.graphs import compile_step, label_named, reduce_grad, sharded_transformer, trace, unshard
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.inductor_code import kernels_that_do_nothing

aten = torch.ops.aten


def written(events: list[ScheduleEvent]) -> str:
    """One line per event."""
    lines = []
    for event in events:
        line = event.kind
        if event.bucket is not None:
            line += f" {event.bucket.label}"
        if event.kind == "compute":
            line += f" {event.name}" + (" heavy" if event.is_heavy else "")
        if event.reads:
            line += f" reads {', '.join(bucket.label for bucket in event.reads)}"
        lines.append((line + f" {event.text}").rstrip())
    return "\n".join(lines)


def lowered(function: object, *inputs: Tensor) -> fx.Graph:
    graph = trace(function, *inputs).graph
    bucket_all_gathers(graph, bucket_mode="coalesced")
    bucket_reduce_scatters(graph, bucket_mode="coalesced")
    return graph


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_events() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ unshard(a, 0, rows=5).t()).relu()
        return y.t() @ x @ unshard(b, 1), reduce_grad(x.t() @ x, 0)

    graph = lowered(function, torch.ones(1, 8), torch.ones(1, 8), torch.ones(4, 8), label_named("unit"))
    schedule_one_layer_ahead(graph, prefetch=1)
    label = graph.find_nodes(op="placeholder")[-1]
    annotate_regions(graph, labels={0: label}, is_backward=False)
    assert_expected_inline(
        written(events_from_graph(graph)),
        """\
region_begin all_gather
start all_gather 0 (unit 0)
region_end
start all_gather 1 (unit 1)
wait all_gather 0 (unit 0)
region_begin forward_compute
compute t reads all_gather 0 (unit 0)
compute mm heavy reads all_gather 0 (unit 0)
compute relu
compute t_1
compute mm_1 heavy
region_end
wait all_gather 1 (unit 1)
compute mm_2 heavy reads all_gather 1 (unit 1)
compute t_2
region_begin forward_compute
compute mm_3 heavy
region_end
region_begin reduce_scatter
start reduce_scatter 0 (unit 0)
region_end
wait reduce_scatter 0 (unit 0)""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_graph_without_collectives_is_compute_alone() -> None:
    graph = trace(lambda x: (x @ x.t()).relu(), torch.ones(4, 8)).graph
    assert {event.kind for event in events_from_graph(graph)} == {"compute"}
    assert gathered_reads(graph) == {}


@pytest.mark.usefixtures("eight_fake_ranks")
def test_reads_go_through_views_and_casts_and_end_at_what_is_computed() -> None:
    def function(a: Tensor, x: Tensor) -> Tensor:
        weight = unshard(a, 0)
        turned = weight.t()[:4].to(torch.float64)
        scaled = weight * 2
        return (turned.sum() + scaled.sum()) * x

    graph = lowered(function, torch.ones(1, 8), torch.ones(4, 8))
    names = [node.name for node in gathered_reads(graph)]
    assert "sum_1" in names
    assert "mul" in names
    assert "sum_2" not in names
    assert "mul_1" not in names


@pytest.mark.usefixtures("eight_fake_ranks")
def test_nodes_of_a_bucket_know_it_and_their_role() -> None:
    def function(a: Tensor, x: Tensor) -> Tensor:
        return x @ unshard(a, 0, rows=5, dtype=torch.bfloat16).t()

    graph = lowered(function, torch.ones(1, 8), torch.ones(4, 8).bfloat16())
    roles = [role_of(node) for node in graph.nodes if bucket_of(node) is not None]
    assert roles == ["start", "wait", "wait", "finish"]
    (bucket,) = {bucket_of(node) for node in graph.nodes} - {None}
    assert bucket == Bucket("all_gather", 0, 0, 1, 8 * 8 * 2, torch.bfloat16, True)
    assert bucket.label == "all_gather 0 (unit 0)"


def test_heavy_steps_are_products_convolutions_attention_and_what_others_brought() -> None:
    def node(target: object) -> fx.Node:
        return fx.Graph().call_function(target, ())

    heavy = [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_mm.default,
        torch.ops.higher_order.flex_attention,
        aten.mv.default,
        torch.ops.quantized.linear.default,
    ]
    light = [
        aten.add.Tensor,
        aten.relu.default,
        aten.native_layer_norm.default,
        aten.sum.default,
        aten.view.default,
        torch.ops.prims.convert_element_type.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops.fsdp_passes.unshard.default,
        len,
    ]
    assert [target for target in heavy if not is_heavy(node(target))] == []
    assert [target for target in light if is_heavy(node(target))] == []
    assert not is_heavy(fx.Graph().placeholder("x"))


# ---- Inductor's kernels ----------------------------------------------------------------------------------------------


def collectives_and_products(events: list[ScheduleEvent]) -> list[str]:
    words = []
    for event in events:
        if event.kind in ("start", "wait"):
            words.append(f"{event.kind} {event.bucket.label}")  # type: ignore[union-attr]
        elif event.is_heavy:
            words.append("heavy " + ",".join(bucket.label for bucket in event.reads))
        elif event.kind.startswith("region"):
            words.append(f"{event.kind} {event.text}")
    return words


@pytest.mark.parametrize("nvtx", [True, False])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_kernels_events_are_those_of_the_graph(nvtx: bool) -> None:
    inductor = {"force_disable_caches": True}
    options = {"inner": "inductor", "inductor": inductor, "nvtx": nvtx}
    with kernels_that_do_nothing():
        # What is computed again is fused with what reads it, and so the products around it may change places.
        record = compile_step(
            sharded_transformer(dim=64), torch.arange(64) % 10, recompute_elementwise=False, **options
        )
    assert len(record.graphs) == 2
    for graph in record.graphs:
        assert graph.kernel_events is not None
        assert collectives_and_products(graph.kernel_events) == collectives_and_products(graph.events)
        assert graph.kernel_report is not None
        assert graph.report is not None
        assert graph.kernel_report.max_unsharded_bytes == graph.report.max_unsharded_bytes
