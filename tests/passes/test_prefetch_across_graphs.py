"""prefetch_across_graphs: the first gather of a graph can be started by the graph before it."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fsdp_passes.gather_ops import ALL_GATHER_AHEAD_OP, START_NEXT_GRAPH
from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.passes.prefetch_across_graphs import prefetch_across_graphs
from fsdp_passes.passes.schedule_one_layer_ahead import schedule_one_layer_ahead
from fsdp_passes.pipeline import graph_text
from tests.graphs import changes, label_named, steps, trace, transformer_record, unshard
from tests.graphs import eight_fake_ranks as eight_fake_ranks

SHARD, X = torch.ones(1, 8), torch.ones(4, 8)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_changes() -> None:
    forward, backward = transformer_record().graphs
    assert_expected_inline(
        changes(forward.passes["schedule_one_layer_ahead"], forward.passes["prefetch_across_graphs"]),
        """\
-all_gather_0 = all_gather([primals_1], primals_11, 8, '0', float32, False)
+all_gather_0 = all_gather_ahead([primals_1], primals_11, 8, '0', float32, False, False)
+start_next_graph_default = start_next_graph(primals_11)""",
    )
    assert_expected_inline(
        changes(backward.passes["schedule_one_layer_ahead"], backward.passes["prefetch_across_graphs"]),
        """\
-all_gather_0 = all_gather([primals_8, primals_7], primals_14, 8, '0', float32, False)
+all_gather_0 = all_gather_ahead([primals_8, primals_7], primals_14, 8, '0', float32, False, True)
+start_next_graph_default = start_next_graph(primals_14)""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_next_graph_is_started_while_the_unit_before_the_last_computes() -> None:
    text = steps(transformer_record().graphs[0].passes["prefetch_across_graphs"]).split()
    at = text.index("start_next")
    assert text[at - 1] == "add_2"  # the end of layers.2; the gather of norm and head started before it
    assert text[at + 1] == "all_gather_4.wait"
    assert text.index("all_gather_4.start") < at


@pytest.mark.usefixtures("eight_fake_ranks")
def test_in_a_graph_of_one_unit_the_next_is_started_before_its_compute() -> None:
    graph = trace(lambda shard, x, label: x @ unshard(shard, 0, label=label), SHARD, X, label_named("unit")).graph
    bucket_all_gathers(graph, bucket_mode="coalesced")
    schedule_one_layer_ahead(graph, prefetch=1)
    assert prefetch_across_graphs(graph, is_backward=False)
    assert steps(graph).split() == ["all_gather_0.start", "start_next", "all_gather_0.wait", "mm"]


@pytest.mark.usefixtures("eight_fake_ranks")
def test_both_dtypes_of_the_first_unit_can_be_started_ahead() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        half = (x.bfloat16() @ unshard(b, 0, label=first)).float()
        return half @ unshard(a, 0, label=first) @ unshard(c, 1, label=second)

    shards = SHARD, SHARD.bfloat16(), SHARD
    graph = trace(function, *shards, X, label_named("a"), label_named("b")).graph
    bucket_all_gathers(graph, bucket_mode="coalesced")
    schedule_one_layer_ahead(graph, prefetch=1)
    prefetch_across_graphs(graph, is_backward=True)
    ahead = graph.find_nodes(op="call_function", target=ALL_GATHER_AHEAD_OP)
    assert [(node.args[4], node.args[6]) for node in ahead] == [(torch.bfloat16, True), (torch.float32, True)]
    (marker,) = graph.find_nodes(op="call_function", target=START_NEXT_GRAPH)
    assert marker.args == (ahead[0].args[1],)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_second_run_and_a_graph_without_labels_change_nothing() -> None:
    graph = trace(lambda shard, x: x @ unshard(shard, 0), SHARD, X).graph
    bucket_all_gathers(graph, bucket_mode="coalesced")
    before = graph_text(graph)
    assert not prefetch_across_graphs(graph, is_backward=False)
    assert graph_text(graph) == before
    graph = trace(lambda shard, x, label: x @ unshard(shard, 0, label=label), SHARD, X, label_named("unit")).graph
    bucket_all_gathers(graph, bucket_mode="coalesced")
    assert prefetch_across_graphs(graph, is_backward=False)
    before = graph_text(graph)
    assert not prefetch_across_graphs(graph, is_backward=False)
    assert graph_text(graph) == before
