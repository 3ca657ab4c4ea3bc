"""insert_unshard: full-shaped inputs become shards that are gathered before their first use."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fsdp_passes import fully_shard
from fsdp_passes.ops import UNSHARD
from fsdp_passes.passes.find_parameter_uses import find_parameter_uses
from fsdp_passes.passes.insert_unshard import insert_unshard
from fsdp_passes.pipeline import graph_text
from fsdp_passes.unit import unit_of
from tests.graphs import TinyTransformer, dynamo_graph, sharded_transformer, short
from tests.ranks import RankPool


def insert(model: object, *inputs: Tensor, suffix: str = "") -> tuple[fx.GraphModule, list[object], list[int]]:
    gm, example_inputs = dynamo_graph(model, *inputs)
    uses = find_parameter_uses(gm, example_inputs)
    return gm, example_inputs, insert_unshard(gm, uses, reduce_group_suffix=suffix)


def unshards(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=UNSHARD)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_dynamo_graph_of_one_layer() -> None:
    gm, example_inputs = dynamo_graph(sharded_transformer(layers=1), torch.arange(4))
    uses = find_parameter_uses(gm, example_inputs)
    assert insert_unshard(gm, uses, reduce_group_suffix="") == [0, 1]
    text = graph_text(gm.graph)
    # Dynamo's own names differ between releases.
    names = {use.node.name: use.param.qualified_name for use in uses}
    names |= {node.name: f"v{i}" for i, node in enumerate(n for n in gm.graph.nodes if n.op == "call_function")}
    for name, plain in names.items():
        text = re.sub(rf"\b{name}\b(?!\()", plain, text)
    assert_expected_inline(
        short(text),
        """\
embed.weight = input
l_tokens_ = input
layers.0.norm.weight = input
layers.0.mlp.weight = input
norm.weight = input
head.weight = input
label_0 = input
label_1 = input
v0 = unshard(embed.weight, label_0, 0, 10, 8, '0', '0', float32, float32, False)
v1 = embedding(l_tokens_, v0, None, None, 2.0, False, False)
v2 = unshard(layers.0.norm.weight, label_1, 1, 8, 8, '0', '0', float32, float32, True)
v3 = layer_norm(v1, [8], v2, None, 1e-05)
v4 = unshard(layers.0.mlp.weight, label_1, 1, 8, 8, '0', '0', float32, float32, True)
v5 = linear(v3, v4, None)
v6 = gelu(v5)
v7 = add(v1, v6)
v8 = unshard(norm.weight, label_0, 0, 8, 8, '0', '0', float32, float32, False)
v9 = layer_norm(v7, [8], v8, None, 1e-05)
v10 = unshard(head.weight, label_0, 0, 10, 8, '0', '0', float32, float32, False)
v11 = linear(v9, v10, None)
return [v11]""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_without_uses_nothing_is_inserted() -> None:
    gm, _ = dynamo_graph(TinyTransformer(), torch.arange(4))
    before = graph_text(gm.graph)
    assert insert_unshard(gm, [], reduce_group_suffix="") == []
    assert graph_text(gm.graph) == before


def test_a_graph_without_inputs_is_left_alone() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ones, ((2,),)))
    gm = fx.GraphModule(nn.Module(), graph)
    assert insert_unshard(gm, [], reduce_group_suffix="") == []


@pytest.mark.usefixtures("eight_fake_ranks")
def test_inserting_again_changes_nothing() -> None:
    gm, example_inputs = dynamo_graph(sharded_transformer(), torch.arange(4))
    uses = find_parameter_uses(gm, example_inputs)
    insert_unshard(gm, uses, reduce_group_suffix="")
    before = graph_text(gm.graph)
    assert insert_unshard(gm, uses, reduce_group_suffix="") == []
    assert graph_text(gm.graph) == before


@pytest.mark.usefixtures("eight_fake_ranks")
def test_gradients_are_reduced_over_the_group_with_the_suffix_and_gathers_are_not() -> None:
    gm, _, _ = insert(sharded_transformer(), torch.arange(4), suffix=":reduce")
    assert {(node.args[5], node.args[6]) for node in unshards(gm)} == {("0", "0:reduce")}


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_weight_that_is_read_twice_is_gathered_once_before_its_first_read() -> None:
    layer = fully_shard(nn.Linear(8, 8, bias=False))

    def twice(x: Tensor) -> Tensor:
        return x @ layer.weight.t() + (2 * x) @ layer.weight

    gm, _, _ = insert(twice, torch.ones(4, 8))
    (gathered,) = unshards(gm)
    assert len(gathered.users) == 2
    order = list(gm.graph.nodes)
    assert order[order.index(gathered) + 1] in gathered.users


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_parameter_whose_view_is_only_returned_is_gathered_too() -> None:
    layer = fully_shard(nn.Linear(8, 8, bias=False))
    gm, _, _ = insert(lambda x: (x + 1, layer.weight.t()), torch.ones(4, 8))
    (gathered,) = unshards(gm)
    (view,) = gathered.users
    assert view in gm.graph.output_node().all_input_nodes


class Uneven(nn.Module):
    """Five rows on two ranks, and a weight that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.bias = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t() @ (2 * self.weight) + self.bias).tanh()


def values_and_gradients() -> None:
    """On every rank: the Dynamo graph with `unshard` ops against the plain module on the whole batch."""
    torch.manual_seed(0)
    model, batch = Uneven(), torch.randn(4, 3)
    expected = model(batch)
    expected.sum().backward()
    grads = {name: param.grad / 2 for name, param in model.named_parameters()}  # the mean over two ranks
    rank = dist.get_rank()
    fully_shard(model)
    mine = batch.chunk(2)[rank]
    gm, inputs, label_from = insert(model, mine)
    params = {}
    for position, value in enumerate(inputs):
        param = getattr(value, "_fsdp_parameter", None)
        if param is not None:
            inputs[position] = param.shard().detach().requires_grad_()
            params[param.name] = inputs[position]
    (found,) = gm(*inputs, *[unit_of(model).label for _ in label_from])
    torch.testing.assert_close(found, expected.chunk(2)[rank], rtol=0, atol=1e-5)
    found.sum().backward()
    weight_rows = torch.cat([grads["weight"], torch.zeros(1, 3)]).chunk(2)[rank]  # padded to six rows
    torch.testing.assert_close(params["weight"].grad, weight_rows, rtol=0, atol=1e-5)
    bias_rows = grads["bias"] if rank == 0 else torch.zeros(1)
    torch.testing.assert_close(params["bias"].grad, bias_rows, rtol=0, atol=1e-5)


def test_the_graph_computes_the_models_values_and_averaged_gradients(two_ranks: RankPool) -> None:
    two_ranks.run("tests.passes.test_insert_unshard:values_and_gradients")
