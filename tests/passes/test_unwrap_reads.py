"""unwrap_reads: operators read parameters themselves, and what leaves a graph is a view."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fsdp_passes import fully_shard
from fsdp_passes.passes.unwrap_reads import unwrap_reads
from fsdp_passes.pipeline import graph_text
from tests.graphs import graph_as_traced, short


def _traced(model: nn.Module) -> fx.GraphModule:
    return graph_as_traced(fully_shard(model), torch.ones(2, 8))[0]


def views(gm: fx.GraphModule) -> int:
    parts = [part for part in gm.modules() if isinstance(part, fx.GraphModule)]
    return sum(len(part.graph.find_nodes(op="call_method", target="view_as")) for part in parts)


class Returns(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            weight = self.weight
            x = x * 2
        return x @ weight + weight.sum(), weight


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_returned_parameter_stays_a_view_ahead_of_the_no_grad_that_it_was_read_in() -> None:
    gm = _traced(Returns(8, 8, bias=False))
    assert unwrap_reads(gm) == 0
    name = gm.graph.find_nodes(op="placeholder")[0].name  # Dynamo's differs between releases
    assert_expected_inline(
        short(graph_text(gm.graph).replace(name, "weight")),
        """\
weight = input
l_x_ = input
view = view_as(weight, weight)
_set_grad_enabled = _set_grad_enabled(False)
x = mul(l_x_, 2)
_set_grad_enabled_1 = _set_grad_enabled(True)
matmul = matmul(x, weight)
sum_1 = sum(weight)
add = add(matmul, sum_1)
return [add, view]""",
    )


class Checkpointed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) + self.bias


@pytest.mark.usefixtures("eight_fake_ranks")
def test_reads_are_unwrapped_in_the_bodies_of_operators_too_and_once() -> None:
    gm = _traced(Checkpointed(8, 8))
    before = views(gm)
    assert before >= 3
    assert unwrap_reads(gm) == before
    assert views(gm) == unwrap_reads(gm) == 0
