"""reshard_to_group and read_first_gather: parts are kept in the forward and gathered in the backward."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fsdp_passes import fully_shard
from fsdp_passes.ops import KEEP_PART, UNSHARD
from fsdp_passes.passes.reshard_to_group import read_first_gather, reshard_to_group
from fsdp_passes.passes.tag_reshard_after_forward import tag_reshard_after_forward
from fsdp_passes.pipeline import CompilationRecord, graph_text
from tests.graphs import TinyTransformer, assert_keeps_values, compile_step, short, trace


def kept(shard: Tensor, unit: int, *, rows: int, world_size: int = 8, over: int = 2, reshard: bool = True) -> Tensor:
    """`unshard` on the default group, which is also the group that keeps parts."""
    dtypes = (torch.float32, torch.float32)
    gradient = (None, None, None, 1, "")
    arguments = (shard, None, unit, rows, world_size, "0", "0", *dtypes, reshard, *gradient, over, "0")
    return torch.ops.fsdp_passes.unshard(*arguments)


def two_weights(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return (x @ kept(a, 0, rows=7)).relu() @ kept(b, 0, rows=8)


def graph_of_two_weights() -> fx.Graph:
    return trace(two_weights, torch.ones(1, 8), torch.ones(1, 8), torch.ones(4, 7)).graph


def transformer_record(**how: int | None) -> CompilationRecord:
    model = fully_shard(TinyTransformer(), units=["layers.*"], **how)
    return compile_step(model, torch.arange(4))


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_joint() -> None:
    graph = graph_of_two_weights()
    assert reshard_to_group(graph) == 2
    graph.lint()
    assert_expected_inline(
        short(graph_text(graph)),
        """\
a_1: float32[1, 8] = input
b_1: float32[1, 8] = input
x_1: float32[4, 7] = input
unshard: float32[7, 8] = unshard(a_1, None, 0, 7, 8, '0', '0', float32, float32, True, None, None, None, 1, '', 2,
        '0')
keep_part_default: float32[4, 8] = keep_part(unshard, 2, '0')
unshard_default: float32[7, 8] = unshard(keep_part_default, None, 0, 7, 2, '0', '0', float32, float32, True)
mm: float32[4, 8] = aten.mm(x_1, unshard_default)
relu: float32[4, 8] = aten.relu(mm)
unshard_1: float32[8, 8] = unshard(b_1, None, 0, 8, 8, '0', '0', float32, float32, True, None, None, None, 1, '', 2,
        '0')
keep_part_default_1: float32[4, 8] = keep_part(unshard_1, 2, '0')
unshard_default_1: float32[8, 8] = unshard(keep_part_default_1, None, 0, 8, 2, '0', '0', float32, float32, True)
mm_1: float32[4, 8] = aten.mm(relu, unshard_default_1)
return mm_1""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_forward_keeps_parts_behind_the_last_read_of_the_unit() -> None:
    graph = graph_of_two_weights()
    reshard_to_group(graph)
    output = next(iter(reversed(graph.nodes)))
    output.args = ([output.args[0], *graph.find_nodes(op="call_function", target=KEEP_PART)],)
    assert read_first_gather(graph) == 2
    graph.lint()
    assert_expected_inline(
        short(graph_text(graph)),
        """\
a_1: float32[1, 8] = input
b_1: float32[1, 8] = input
x_1: float32[4, 7] = input
unshard: float32[7, 8] = unshard(a_1, None, 0, 7, 8, '0', '0', float32, float32, True, None, None, None, 1, '', 2,
        '0')
mm: float32[4, 8] = aten.mm(x_1, unshard)
relu: float32[4, 8] = aten.relu(mm)
unshard_1: float32[8, 8] = unshard(b_1, None, 0, 8, 8, '0', '0', float32, float32, True, None, None, None, 1, '', 2,
        '0')
mm_1: float32[4, 8] = aten.mm(relu, unshard_1)
keep_part_default: float32[4, 8] = keep_part(unshard, 2, '0')
keep_part_default_1: float32[4, 8] = keep_part(unshard_1, 2, '0')
return [mm_1, keep_part_default, keep_part_default_1]""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_parts_that_nobody_saves_are_left_out() -> None:
    graph = graph_of_two_weights()
    before = graph_text(graph)
    reshard_to_group(graph)
    assert read_first_gather(graph) == 2
    assert graph_text(graph) == before


@pytest.mark.usefixtures("eight_fake_ranks")
def test_does_nothing_without_a_group_or_resharding_and_when_called_again() -> None:
    def plain(a: Tensor, b: Tensor) -> Tensor:
        return kept(a, 0, rows=8, over=0) @ kept(b, 1, rows=8, reshard=False)

    graph = trace(plain, torch.ones(1, 8), torch.ones(1, 8)).graph
    before = graph_text(graph)
    assert reshard_to_group(graph) == read_first_gather(graph) == 0
    assert graph_text(graph) == before
    graph = graph_of_two_weights()
    reshard_to_group(graph)
    before = graph_text(graph)
    assert reshard_to_group(graph) == 0
    assert graph_text(graph) == before


@pytest.mark.usefixtures("eight_fake_ranks")
def test_parts_are_saved_and_their_gathers_recomputed() -> None:
    graph = graph_of_two_weights()
    reshard_to_group(graph)
    tag_reshard_after_forward(graph)
    policies = {
        target: {node.meta["recompute"].name for node in graph.find_nodes(op="call_function", target=target)}
        for target in (KEEP_PART, UNSHARD)
    }
    assert policies == {KEEP_PART: {"MUST_SAVE"}, UNSHARD: {"MUST_RECOMPUTE"}}


@pytest.mark.usefixtures("one_rank")
def test_values_stay() -> None:
    inputs = [torch.randn(7, 8), torch.randn(4, 7)]
    gm = trace(lambda a, x: x @ kept(a, 0, rows=7, world_size=1, over=1), *inputs)
    assert_keeps_values(gm, inputs, reshard_to_group)
    assert_keeps_values(gm, inputs, read_first_gather)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_models_backward_gathers_as_often_over_fewer_ranks() -> None:
    def gathers(record: CompilationRecord) -> list[list[tuple[int, int, int]]]:
        starts = [[event.bucket for event in graph.events if event.kind == "start"] for graph in record.graphs]
        return [[(b.unit, b.num_params, b.num_ranks) for b in bs if b.kind == "all_gather"] for bs in starts]

    forward, backward = gathers(transformer_record(reshard_after_forward=4))
    all_ranks = gathers(transformer_record(reshard_after_forward=True))
    assert forward == all_ranks[0]
    assert backward == [(unit, num_params, 4) for unit, num_params, _ in all_ranks[1]]
    assert {ranks for _, _, ranks in all_ranks[1]} == {8}
