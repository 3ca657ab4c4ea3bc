"""tag_reshard_after_forward: gathered weights, their views and casts are recomputed and never saved."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.passes.tag_reshard_after_forward import tag_reshard_after_forward
from fsdp_passes.pipeline import GraphRecord
from tests.graphs import TinyTransformer, compile_step, switched_off, trace, transformer_record, unshard

TAGGER = "fsdp_passes.pipeline.tag_reshard_after_forward"


def weight_with_views(shard: Tensor, x: Tensor) -> Tensor:
    weight = unshard(shard, 0)
    half = weight.t().to(torch.bfloat16)
    return (x.bfloat16() @ half).float() + (weight * 2).sum()


def tags(graph: fx.Graph) -> str:
    return "\n".join(f"{node.name}: {node.meta['recompute'].name}" for node in graph.nodes if "recompute" in node.meta)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_tags_of_a_weight_with_a_view_and_a_cast() -> None:
    graph = trace(weight_with_views, torch.ones(1, 8), torch.ones(4, 8)).graph
    assert tag_reshard_after_forward(graph) == 3
    assert_expected_inline(
        tags(graph),
        """\
unshard: MUST_RECOMPUTE
t: MUST_RECOMPUTE
_to_copy: MUST_RECOMPUTE""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_tags_of_a_weight_that_is_kept() -> None:
    graph = trace(lambda shard, x: x @ unshard(shard, 0, reshard=False).t(), torch.ones(1, 8), torch.ones(4, 8)).graph
    assert tag_reshard_after_forward(graph) == 1
    assert_expected_inline(
        tags(graph),
        """unshard: MUST_SAVE""",
    )


def test_without_unshard_nothing_is_tagged() -> None:
    graph = trace(lambda w, x: x @ w.t().to(x.dtype), torch.ones(8, 8), torch.ones(4, 8)).graph
    assert tag_reshard_after_forward(graph) == 0
    assert tags(graph) == ""


@pytest.mark.usefixtures("eight_fake_ranks")
def test_tagging_again_changes_nothing() -> None:
    graph = trace(weight_with_views, torch.ones(1, 8), torch.ones(4, 8)).graph
    tag_reshard_after_forward(graph)
    before = {node: (node.meta.get("recompute"), node.meta.get("ac_graph_id")) for node in graph.nodes}
    assert tag_reshard_after_forward(graph) == 3
    assert {node: (node.meta.get("recompute"), node.meta.get("ac_graph_id")) for node in graph.nodes} == before


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_users_checkpoint_tags_stay_and_ours_lie_above_them() -> None:
    graph = trace(weight_with_views, torch.ones(1, 8), torch.ones(4, 8)).graph
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    product.meta |= {"recompute": CheckpointPolicy.PREFER_SAVE, "ac_graph_id": 7}
    tag_reshard_after_forward(graph)
    assert product.meta["recompute"] is CheckpointPolicy.PREFER_SAVE
    assert product.meta["ac_graph_id"] == 7
    ours = [node.meta["ac_graph_id"] for node in graph.nodes if "recompute" in node.meta and node is not product]
    assert len(ours) == 3
    assert min(ours) > 7


@pytest.mark.usefixtures("eight_fake_ranks")
def test_what_is_computed_from_a_weight_is_not_taken_for_the_weight() -> None:
    """A product with a constant is a new tensor, and so is whatever reads an activation: both may be saved."""
    graph = trace(weight_with_views, torch.ones(1, 8), torch.ones(4, 8)).graph
    tag_reshard_after_forward(graph)
    (scaled,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert "recompute" not in scaled.meta
    assert "recompute" not in graph.find_nodes(op="placeholder")[0].meta


_SAME_WEIGHT = re.compile(
    r"(\w+).* = (?:getitem|_c10d_functional\.wait_tensor|(?:aten|prims)\."
    r"(?:t|view|slice|alias|detach|permute|transpose|clone|_to_copy|convert_element_type))(?:\.\w+)*\((\w+)"
)


def gathers_of_saved_weights(forward: GraphRecord) -> set[str]:
    """The all-gathers of which the forward graph returns a result, or a view, copy or cast of one."""
    *lines, returned = forward.passes["annotate_regions"].splitlines()
    gather_of: dict[str, str] = {}
    for line in lines:
        name = re.match(r"\w+", line)[0]
        if re.match(r"all_gather_\d+ = ", line):
            gather_of[name] = name
        elif (match := _SAME_WEIGHT.match(line)) and match[2] in gather_of:
            gather_of[name] = gather_of[match[2]]
    return {gather_of[name] for name in re.findall(r"\w+", returned) if name in gather_of}


def num_gathers(graph: GraphRecord) -> int:
    return len(re.findall(r"^all_gather_\d+ = ", graph.passes["annotate_regions"], re.MULTILINE))


HEAD_ONLY = {"all_gather_4"}  # the root keeps its weights; the backward reads those of its second run, norm and head


@pytest.mark.usefixtures("eight_fake_ranks")
def test_no_weight_of_a_layer_is_saved_and_the_backward_gathers_them_itself() -> None:
    forward, backward = transformer_record().graphs
    assert gathers_of_saved_weights(forward) == HEAD_ONLY
    assert (num_gathers(forward), num_gathers(backward)) == (5, 3)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_without_this_pass_the_weights_would_be_saved() -> None:
    with switched_off(TAGGER):
        forward, backward = transformer_record().graphs
    assert gathers_of_saved_weights(forward) == {f"all_gather_{index}" for index in range(1, 5)}
    assert (num_gathers(forward), num_gathers(backward)) == (5, 0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_no_weight_in_mixed_precision_is_saved(tied: bool) -> None:
    model = TinyTransformer()
    if tied:
        model.head.weight = model.embed.weight
    fully_shard(model, units=["layers.*"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    forward, backward = compile_step(model, torch.arange(4)).graphs
    # Tied, the head's weight is gathered with the embedding's first use.
    assert gathers_of_saved_weights(forward) == (HEAD_ONLY | {"all_gather_0"} if tied else HEAD_ONLY)
    assert (num_gathers(forward), num_gathers(backward)) == (5, 3)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_root_that_reshards_saves_nothing_and_is_gathered_again() -> None:
    model = fully_shard(TinyTransformer(), units=["layers.*"], reshard_after_forward=True)
    forward, backward = compile_step(model, torch.arange(4)).graphs
    assert gathers_of_saved_weights(forward) == set()
    assert (num_gathers(forward), num_gathers(backward)) == (4, 4)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_layers_that_do_not_reshard_save_their_weights_and_are_gathered_once() -> None:
    model = fully_shard(TinyTransformer(), units=["layers.*"], reshard_after_forward=False)
    forward, backward = compile_step(model, torch.arange(4)).graphs
    assert gathers_of_saved_weights(forward) == {f"all_gather_{index}" for index in range(1, 5)}
    assert (num_gathers(forward), num_gathers(backward)) == (5, 0)


class Checkpointed(nn.Module):
    """Every layer in an activation checkpoint."""

    def __init__(self, inside: TinyTransformer) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inside.embed(tokens)
        for layer in self.inside.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.inside.head(self.inside.norm(x))


@pytest.mark.usefixtures("eight_fake_ranks")
def test_no_weight_of_a_checkpointed_layer_is_saved() -> None:
    model = Checkpointed(TinyTransformer())
    fully_shard(model, units=["inside.layers.*"])
    forward, backward = compile_step(model, torch.arange(4)).graphs
    assert gathers_of_saved_weights(forward) == HEAD_ONLY
    assert (num_gathers(forward), num_gathers(backward)) == (5, 3)


@pytest.mark.parametrize("is_tagged", [True, False])
@pytest.mark.parametrize("make", [TinyTransformer, lambda: Checkpointed(TinyTransformer())])
@pytest.mark.usefixtures("one_rank")
def test_gradients_do_not_depend_on_what_is_saved(make: type[nn.Module], is_tagged: bool) -> None:
    reference = make()
    model = copy.deepcopy(reference)
    fully_shard(model, units=["**.layers.*"])
    tokens = torch.arange(4)
    compiled = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
    with switched_off(TAGGER) if not is_tagged else torch.enable_grad():
        found = compiled(tokens)
        found.square().sum().backward()
    expected = reference(tokens)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for name, param in model.named_parameters():
        wanted = reference.get_parameter(name).grad
        torch.testing.assert_close(param.grad.full_tensor(), wanted, rtol=0, atol=1e-5)
