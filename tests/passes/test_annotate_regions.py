"""annotate_regions: each unit's compute lies in a region of its name."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fsdp_passes import fully_shard
from fsdp_passes.passes.annotate_regions import annotate_regions
from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.passes.schedule_one_layer_ahead import schedule_one_layer_ahead
from fsdp_passes.pipeline import graph_text
from fsdp_passes.regions import num_open_regions
from tests.graphs import (
    TinyTransformer,
    assert_keeps_values,
    changes,
    compile_step,
    label_named,
    reduce_grad,
    steps,
    trace,
    transformer_record,
    unshard,
)

SHARD, X = torch.ones(1, 8), torch.ones(4, 8)


def lower(graph: fx.Graph) -> None:
    bucket_all_gathers(graph, bucket_mode="coalesced")
    bucket_reduce_scatters(graph, bucket_mode="coalesced")
    schedule_one_layer_ahead(graph, prefetch=1)


def annotate(graph: fx.Graph, is_backward: bool = False) -> int:
    """With the inputs called label_0, label_1, ... as the labels of units 0, 1, ..."""
    named = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("label_")]
    labels = {int(node.name.split("_")[1]): node for node in named}
    return annotate_regions(graph, labels=labels, is_backward=is_backward)


def annotated(function: object, *inputs: Tensor, num_labels: int, is_backward: bool = False) -> str:
    """The steps of `function(*inputs)` after all passes; its last inputs are the labels."""
    labels = [label_named(f"unit{unit}") for unit in range(num_labels)]
    graph = trace(function, *inputs, *labels).graph
    lower(graph)
    num_regions = annotate(graph, is_backward)
    graph.lint()
    text, lines = steps(graph), graph_text(graph).splitlines()
    num_starts = sum(line.startswith("region_begin") and not line.endswith("_compute')") for line in lines)
    assert text.count("open(") == text.count("close(") == num_regions - num_starts
    return text


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_forward() -> None:
    passes = transformer_record().graphs[0].passes
    assert_expected_inline(
        steps(passes["annotate_regions"]),
        """\
all_gather_0.start all_gather_1.start all_gather_0.wait open(primals_11) embedding close(primals_11)
all_gather_2.start all_gather_1.wait open(primals_12) native_layer_norm mm gelu add close(primals_12)
all_gather_3.start all_gather_2.wait open(primals_13) native_layer_norm_1 mm_1 gelu_1 add_1 close(primals_13)
all_gather_4.start all_gather_3.wait open(primals_14) native_layer_norm_2 mm_2 gelu_2 add_2 close(primals_14)
start_next all_gather_4.wait open(primals_11) native_layer_norm_3 mm_3 close(primals_11)""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_backward() -> None:
    passes = transformer_record().graphs[1].passes
    assert_expected_inline(
        steps(passes["annotate_regions"]),
        """\
all_gather_0.start all_gather_1.start open(primals_11) mm_4 mm_5 native_layer_norm_backward gelu_backward
close(primals_11) reduce_scatter_0.start open(primals_14) mm_6 all_gather_0.wait mm_7
native_layer_norm_backward_1 add_3 gelu_backward_1 close(primals_14) all_gather_2.start reduce_scatter_1.start
reduce_scatter_0.wait open(primals_13) mm_8 all_gather_1.wait mm_9 gelu add native_layer_norm_backward_2 add_4
gelu_backward_2 close(primals_13) reduce_scatter_2.start reduce_scatter_1.wait open(primals_12) mm_10
start_next all_gather_2.wait mm_11 native_layer_norm_backward_3 reduce_scatter_3.start reduce_scatter_2.wait
add_5 close(primals_12) open(primals_11) embedding_dense_backward close(primals_11) reduce_scatter_4.start
reduce_scatter_3.wait reduce_scatter_4.wait""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_nothing_but_regions_is_inserted() -> None:
    for graph in transformer_record().graphs:
        inserted = changes(graph.passes["prefetch_across_graphs"], graph.passes["annotate_regions"]).splitlines()
        starts = (
            {"all_gather": 5, "reduce_scatter": 0}
            if graph.phase == "forward"
            else {"all_gather": 3, "reduce_scatter": 5}
        )
        assert len(inserted) == 2 * (5 + sum(starts.values()))
        assert all(line.startswith("+region_") for line in inserted)
        assert sum(f"'{graph.phase}_compute'" in line for line in inserted) == 5
        for kind, num_starts in starts.items():
            assert sum(f"'{kind}'" in line for line in inserted) == num_starts


@pytest.mark.usefixtures("eight_fake_ranks")
def test_each_start_lies_alone_in_a_region_of_its_unit() -> None:
    for graph in transformer_record().graphs:
        lines = graph.passes["annotate_regions"].splitlines()
        starts = [i for i, line in enumerate(lines) if re.match(r"(all_gather|reduce_scatter)_\d+ = ", line)]
        assert len(starts) == (5 if graph.phase == "forward" else 8)
        for i in starts:
            begin = re.fullmatch(r"region_begin\w* = \S*region_begin\S*\((\w+), '(\w+)'\)", lines[i - 1])
            end = re.fullmatch(r"region_end\w* = \S*region_end\S*\((\w+)\)", lines[i + 1])
            assert begin is not None
            assert end is not None
            assert begin[1] == end[1]
            assert lines[i].startswith(begin[2])


@pytest.mark.usefixtures("eight_fake_ranks")
def test_without_labels_nothing_changes() -> None:
    graph = trace(lambda shard, x: x @ unshard(shard, 0), SHARD, X).graph
    lower(graph)
    before = graph_text(graph)
    assert annotate_regions(graph, labels={}, is_backward=False) == 0
    assert graph_text(graph) == before


def test_without_units_nothing_changes() -> None:
    graph = trace(lambda x, label_0: x @ x.t(), X, label_named("unit0")).graph
    before = graph_text(graph)
    assert annotate(graph) == 0
    assert graph_text(graph) == before


@pytest.mark.usefixtures("eight_fake_ranks")
def test_annotating_again_changes_nothing() -> None:
    graph = trace(lambda shard, x, label_0: x @ unshard(shard, 0), SHARD, X, label_named("unit0")).graph
    lower(graph)
    assert annotate(graph) == 2
    before = graph_text(graph)
    assert annotate(graph) == 0
    assert graph_text(graph) == before


@pytest.mark.usefixtures("eight_fake_ranks")
def test_nvtx_false_leaves_only_the_regions_around_starts_and_no_profiler_sees_them() -> None:
    for shown, graph in zip(transformer_record().graphs, transformer_record(nvtx=False).graphs, strict=True):
        compute = f"'{graph.phase}_compute'"
        found, of_shown = (
            [
                line.partition(" = ")[2]
                for line in record.passes["annotate_regions"].splitlines()
                if "region_begin" in line
            ]
            for record in (graph, shown)
        )
        assert found == [f"{line[:-1]}, False)" for line in of_shown if compute not in line]
        assert graph.passes["annotate_regions"].count("region_end.default") == len(found)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_one_unit_has_one_region() -> None:
    def function(shard: Tensor, x: Tensor, label_0: Tensor) -> Tensor:
        return (x @ unshard(shard, 0)).relu()

    assert_expected_inline(
        annotated(function, SHARD, X, num_labels=1),
        """all_gather_0.start all_gather_0.wait open(label_0_1) mm relu close(label_0_1)""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_unit_without_a_label_has_no_region() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor, label_0: Tensor) -> Tensor:
        return (x @ unshard(a, 1)).relu() @ unshard(b, 0)

    assert_expected_inline(
        annotated(function, SHARD, SHARD, X, num_labels=1),
        """\
all_gather_0.start all_gather_1.start all_gather_0.wait mm relu all_gather_1.wait open(label_0_1) mm_1
close(label_0_1)""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_unit_that_is_read_in_two_places_has_two_regions() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor, label_0: Tensor, label_1: Tensor) -> Tensor:
        weight = unshard(a, 0, reshard=False)
        return (x @ weight).relu() @ unshard(b, 1) @ weight.t()

    assert_expected_inline(
        annotated(function, SHARD, SHARD, X, num_labels=2),
        """\
all_gather_0.start all_gather_1.start all_gather_0.wait open(label_0_1) mm relu close(label_0_1)
all_gather_1.wait open(label_1_1) mm_1 close(label_1_1) open(label_0_1) mm_2 close(label_0_1)""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_what_runs_before_the_first_unit_belongs_to_it() -> None:
    def function(a: Tensor, x: Tensor, label_0: Tensor) -> Tensor:
        return x.exp() @ unshard(a, 0)

    assert_expected_inline(
        annotated(function, SHARD, X, num_labels=1),
        """all_gather_0.start open(label_0_1) exp all_gather_0.wait mm close(label_0_1)""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_in_the_backward_a_unit_that_was_kept_begins_where_its_gradients_are_made() -> None:
    def function(
        a: Tensor, kept: Tensor, grad: Tensor, x: Tensor, label_0: Tensor, label_1: Tensor
    ) -> tuple[Tensor, ...]:
        head = reduce_grad(grad.t() @ x, 1)
        grad = grad @ kept
        return head, reduce_grad(grad.t() @ x, 0), grad @ unshard(a, 0)

    assert_expected_inline(
        annotated(function, SHARD, torch.ones(8, 8), X, X, num_labels=2, is_backward=True),
        """\
all_gather_0.start open(label_1_1) mm reduce_scatter_0.start mm_1 close(label_1_1) open(label_0_1) mm_2
reduce_scatter_1.start reduce_scatter_0.wait all_gather_0.wait mm_3 close(label_0_1) reduce_scatter_1.wait""",
    )


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_in_the_backward_both_products_of_a_layer_lie_in_its_own_region(reshard: bool) -> None:
    """Autograd makes the product for a weight's gradient before the one that reads the weight."""
    model = fully_shard(TinyTransformer(), units=["layers.*"], reshard_after_forward=reshard)
    _, backward = compile_step(model, torch.arange(4)).graphs
    label, products = "", {}
    for word in steps(backward.passes["annotate_regions"]).split():
        if word.startswith("open"):
            label = word.removeprefix("open(").removesuffix(")")
        elif word.startswith("mm"):
            products.setdefault(label, []).append(word)
    root, layers = "primals_11", ["primals_12", "primals_13", "primals_14"]
    assert products == {
        root: ["mm_4", "mm_5"],
        layers[2]: ["mm_6", "mm_7"],
        layers[1]: ["mm_8", "mm_9"],
        layers[0]: ["mm_10", "mm_11"],
    }


@pytest.mark.usefixtures("one_rank")
def test_the_annotated_graph_computes_the_same_values_and_opens_each_region() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor, label_0: Tensor, label_1: Tensor) -> Tensor:
        return (x @ unshard(a, 0, world_size=1)).relu() @ unshard(b, 1, world_size=1)

    inputs = [torch.randn(8, 8), torch.randn(8, 8), X, label_named("layers.0"), label_named("layers.1")]
    gm = trace(function, *inputs)

    def lower_and_annotate(graph: fx.Graph) -> None:
        lower(graph)
        assert annotate(graph) == 4

    assert_keeps_values(gm, inputs, lower_and_annotate)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        gm(*inputs)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events if event.name.startswith("FSDP:") or event.name == "aten::mm"]
    assert names == [
        *("FSDP:layers.0:all_gather", "FSDP:layers.1:all_gather"),
        *("FSDP:layers.0:forward_compute", "aten::mm", "FSDP:layers.1:forward_compute", "aten::mm"),
    ]
    assert num_open_regions() == 0
