"""annotate_collectives: whose a collective is and why it is there, on its line of the graph."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fsdp_passes.passes.annotate_collectives import annotate_collectives
from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.passes.schedule_one_layer_ahead import schedule_one_layer_ahead
from tests.graphs import assert_keeps_values, reduce_grad, trace, transformer_record, unshard
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import one_rank as one_rank

NAMES = ["first", "second"]


def function(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x @ unshard(a, 0, rows=5).t()).relu()
    return y.t() @ x @ unshard(b, 1), reduce_grad(x.t() @ x, 0)


def scheduled() -> fx.Graph:
    graph = trace(function, torch.ones(1, 8), torch.ones(1, 8), torch.ones(4, 8)).graph
    bucket_all_gathers(graph, bucket_mode="coalesced")
    bucket_reduce_scatters(graph, bucket_mode="coalesced")
    schedule_one_layer_ahead(graph, prefetch=1)
    return graph


def written(graph: fx.Graph) -> str:
    marked = [node for node in graph.nodes if "reason" in node.meta.get("custom", {})]
    return "\n".join(f"{node.name}: {node.meta['custom']['unit']}: {node.meta['custom']['reason']}" for node in marked)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden() -> None:
    graph = scheduled()
    assert annotate_collectives(graph, unit_names=NAMES) == 6
    assert_expected_inline(
        written(graph),
        """\
all_gather_0: first: exposed: nothing computes meanwhile
all_gather_1: second: behind first
wait_tensor_default: first: needed by t
wait_tensor_default_1: second: needed by mm_2
reduce_scatter_0: first: exposed: nothing computes meanwhile
wait_tensor_default_2: first: needed by output""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_second_time_changes_nothing() -> None:
    graph = scheduled()
    annotate_collectives(graph, unit_names=NAMES)
    before = written(graph), str(graph)
    assert annotate_collectives(graph, unit_names=NAMES) == 6
    assert (written(graph), str(graph)) == before


def test_does_nothing_without_collectives() -> None:
    graph = trace(lambda x: x @ x, torch.ones(2, 2)).graph
    assert annotate_collectives(graph, unit_names=[]) == 0
    assert written(graph) == ""


@pytest.mark.usefixtures("eight_fake_ranks")
def test_annotations_of_others_stay() -> None:
    graph = scheduled()
    start = next(node for node in graph.nodes if node.name == "all_gather_1")
    start.meta["custom"] = {"mine": 1}
    annotate_collectives(graph, unit_names=NAMES)
    assert start.meta["custom"] == {"mine": 1, "unit": "second", "reason": "behind first"}


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_unit_without_a_name_is_numbered() -> None:
    graph = scheduled()
    annotate_collectives(graph, unit_names=[])
    assert "all_gather_1: unit 1: behind unit 0" in written(graph)


@pytest.mark.usefixtures("one_rank")
def test_values_stay() -> None:
    def one_rank_function(a: Tensor, x: Tensor) -> Tensor:
        return x @ unshard(a, 0, world_size=1)

    gm = trace(one_rank_function, torch.ones(4, 4), torch.ones(4, 4))

    def transform(graph: fx.Graph) -> None:
        bucket_all_gathers(graph, bucket_mode="coalesced")
        annotate_collectives(graph, unit_names=["unit"])

    assert_keeps_values(gm, [torch.randn(4, 4), torch.randn(4, 4)], transform)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_print_readable_shows_them_on_the_line_above_each_collective() -> None:
    graph = transformer_record().graphs[0].snapshots["scheduled"]
    text = fx.GraphModule(torch.nn.Module(), graph).print_readable(print_output=False).splitlines()
    above = {line.split(":")[0].split(" = ")[0].strip(): text[index - 1] for index, line in enumerate(text)}
    assert "{'unit': 'layers.1', 'reason': 'behind layers.0'}" in above["all_gather_2"]
    assert "{'unit': 'root', 'reason': 'needed by embedding'}" in above["await_collective_default"]
