"""find_parameter_uses: which inputs of a Dynamo graph are sharded parameters."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import MutatedParameterError
from fsdp_passes.passes.find_parameter_uses import ParameterUse, find_parameter_uses
from fsdp_passes.pipeline import graph_text
from tests.graphs import Layer, TinyTransformer, dynamo_graph, sharded_transformer


def described(uses: list[ParameterUse]) -> str:
    return "\n".join(f"input {use.position}: {use.param.qualified_name}, unit {use.unit_index}" for use in uses)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_every_parameter_is_found_and_units_are_numbered_by_first_use() -> None:
    uses = find_parameter_uses(*dynamo_graph(sharded_transformer(), torch.arange(4)))
    assert_expected_inline(
        described(uses),
        """\
input 0: embed.weight, unit 0
input 2: layers.0.norm.weight, unit 1
input 3: layers.0.mlp.weight, unit 1
input 4: layers.1.norm.weight, unit 2
input 5: layers.1.mlp.weight, unit 2
input 6: layers.2.norm.weight, unit 3
input 7: layers.2.mlp.weight, unit 3
input 8: norm.weight, unit 0
input 9: head.weight, unit 0""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_an_unsharded_model_has_no_uses() -> None:
    gm, inputs = dynamo_graph(TinyTransformer(), torch.arange(4))
    assert any(isinstance(value, nn.Parameter) for value in inputs)
    assert find_parameter_uses(gm, inputs) == []


@pytest.mark.usefixtures("eight_fake_ranks")
def test_looking_again_finds_the_same_and_changes_nothing() -> None:
    gm, inputs = dynamo_graph(sharded_transformer(), torch.arange(4))
    before = graph_text(gm.graph)
    assert find_parameter_uses(gm, inputs) == find_parameter_uses(gm, inputs)
    assert graph_text(gm.graph) == before


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_parameter_is_known_by_identity_and_not_by_the_name_of_its_input() -> None:
    gm, inputs = dynamo_graph(sharded_transformer(), torch.arange(4))
    weight = next(use for use in find_parameter_uses(gm, inputs) if use.param.qualified_name == "layers.0.mlp.weight")
    lookalike = nn.Parameter(torch.empty_like(inputs[weight.position], device="meta"))
    inputs[weight.position] = lookalike
    names = [use.param.qualified_name for use in find_parameter_uses(gm, inputs)]
    assert "layers.0.mlp.weight" not in names
    assert len(names) == 8


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_tied_parameter_is_one_use() -> None:
    model = TinyTransformer()
    model.head.weight = model.embed.weight
    fully_shard(model, units=["layers.*"])
    names = [use.param.qualified_name for use in find_parameter_uses(*dynamo_graph(model, torch.arange(4)))]
    assert names.count("embed.weight") == 1
    assert "head.weight" not in names


@pytest.mark.usefixtures("eight_fake_ranks")
def test_an_input_that_nothing_reads_is_left_out() -> None:
    gm, inputs = dynamo_graph(sharded_transformer(), torch.arange(4))
    all_uses = find_parameter_uses(gm, inputs)
    unread = all_uses[0].node
    (reader,) = unread.users
    reader.replace_input_with(unread, all_uses[-1].node)
    assert [use.position for use in find_parameter_uses(gm, inputs)] == [use.position for use in all_uses[1:]]


def write_directly(layer: Layer, x: Tensor) -> Tensor:
    layer.mlp.weight.mul_(2.0)
    return layer(x)


def write_through_a_view(layer: Layer, x: Tensor) -> Tensor:
    layer.mlp.weight.view(-1)[:3].zero_()
    return layer(x)


@pytest.mark.parametrize("function", [write_directly, write_through_a_view])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_code_that_writes_into_a_parameter_is_refused(function: object) -> None:
    layer = fully_shard(Layer(8))
    with torch.no_grad():
        gm, inputs = dynamo_graph(function, layer, torch.ones(4, 8))
    with pytest.raises(MutatedParameterError, match=r"^mlp\.weight: expected a parameter that is only read"):
        find_parameter_uses(gm, inputs)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_refusal_reaches_the_user_of_torch_compile() -> None:
    layer = fully_shard(Layer(8))
    compiled = torch.compile(write_directly, backend=overlap_fsdp, options={"inner": "aot_eager"})
    with torch.no_grad(), pytest.raises(Exception, match=r"mlp\.weight: expected a parameter that is only read"):
        compiled(layer, torch.ones(4, 8))


@pytest.mark.usefixtures("one_rank")
def test_the_graph_on_the_shards_of_the_found_parameters_gives_the_models_output() -> None:
    reference = TinyTransformer()
    tokens = torch.arange(4)
    expected = reference(tokens)
    fully_shard(reference, units=["layers.*"])
    gm, inputs = dynamo_graph(reference, tokens)
    for use in find_parameter_uses(gm, inputs):
        assert inputs[use.position] is use.param.placeholder
        inputs[use.position] = use.param.shard()  # of one rank: the whole parameter
    (found,) = gm(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
