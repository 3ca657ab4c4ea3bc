"""keep_reads_of_written: the backward begins with what was read from a written input, not with the input."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_passes.passes.keep_reads_of_written import keep_reads_of_written
from tests.graphs import trace


def writes_an_average(average: Tensor, other: Tensor, x: Tensor) -> Tensor:
    decayed = average * 0.9
    part = average.view(2, 4).unbind(0)[0].sin()
    result = x * decayed.sum() + part.sum() + other.exp()
    average.copy_(decayed)
    return result


def tagged(graph: fx.Graph) -> str:
    return "\n".join(f"{node.name}: {node.meta['recompute'].name}" for node in graph.nodes if "recompute" in node.meta)


def test_golden_tags_of_what_is_read_from_a_written_input_also_through_views() -> None:
    graph = trace(writes_an_average, torch.ones(8), torch.ones(4), torch.ones(4)).graph
    assert keep_reads_of_written(graph) == 2
    assert_expected_inline(
        tagged(graph),
        """\
mul: MUST_SAVE
sin: MUST_SAVE""",
    )


def test_what_checkpointing_computes_again_stays_so() -> None:
    graph = trace(writes_an_average, torch.ones(8), torch.ones(4), torch.ones(4)).graph
    (first, *_) = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    first.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    assert keep_reads_of_written(graph) == 1
    assert first.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE


def test_without_a_write_nothing_is_tagged() -> None:
    graph = trace(lambda average, x: (average * 0.9).sum() * x, torch.ones(8), torch.ones(4)).graph
    assert keep_reads_of_written(graph) == 0
    assert tagged(graph) == ""
