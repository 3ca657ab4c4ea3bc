"""op_cost.py and steps.py: FLOPs and bytes by hand, against PyTorch's own counter, and whose each step is."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fsdp_passes.cost.op_cost import OpCost, costs_of_graph
from fsdp_passes.cost.predict import op_us
from fsdp_passes.cost.steps import steps_of_graph
from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.passes.schedule_one_layer_ahead import schedule_one_layer_ahead
from fsdp_passes.schedule import ShardedShape
from tests.cost.test_collectives import cluster
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import reduce_grad, trace, unshard

aten = torch.ops.aten


def named_costs(function: object, *inputs: Tensor) -> dict[str, OpCost]:
    return {node.name: cost for node, cost in costs_of_graph(trace(function, *inputs).graph).items()}


def test_a_product_reads_both_sides_and_writes_the_result() -> None:
    (cost,) = named_costs(lambda a, b: a @ b, torch.ones(4, 8), torch.ones(8, 16)).values()
    assert cost == OpCost(2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16 + 4 * 16), torch.float32, True)


def test_light_steps_between_products_are_fused() -> None:
    costs = named_costs(lambda a, b: (a @ b).relu().mul(2.0).add(1.0) @ b, torch.ones(8, 8), torch.ones(8, 8))
    matrix = 4 * 8 * 8
    # The first of the three reads the product, the last writes; what is between them stays in registers.
    assert [costs[name].num_bytes for name in ("relu", "mul", "add")] == [matrix, 0, matrix]


def test_a_tensor_read_by_two_fused_steps_is_read_once() -> None:
    costs = named_costs(lambda a: a.sin() + a.cos(), torch.ones(8))
    assert [cost.num_bytes for cost in costs.values()] == [32, 0, 32]


def test_views_cost_nothing_and_an_expanded_tensor_is_read_once() -> None:
    costs = named_costs(lambda a: a.view(1, 4).expand(100, 4) + 1.0, torch.ones(4))
    assert list(costs) == ["add"]
    assert costs["add"].num_bytes == 4 * 4 + 4 * 400


def test_an_embedding_reads_the_rows_that_it_looks_up() -> None:
    costs = named_costs(lambda table, ids: F.embedding(ids, table), torch.ones(1000, 4), torch.arange(3))
    assert costs["embedding"].num_bytes == 3 * 8 + 2 * 4 * 3 * 4


def test_a_causal_mask_halves_attention_and_the_backward_makes_five_products() -> None:
    q = torch.ones(2, 4, 16, 8)

    def attention(q: Tensor, is_causal: bool) -> Tensor:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, is_causal)[0]

    def backward(q: Tensor) -> Tensor:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, False)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(q, q, q, q, out, lse, 0.0, False)[0]

    full = 2 * 2 * (2 * 4 * 16 * 16) * 8  # two products, two operations each
    assert next(iter(named_costs(lambda q: attention(q, False), q).values())).flops == full
    assert next(iter(named_costs(lambda q: attention(q, True), q).values())).flops == full // 2
    assert list(named_costs(backward, q).values())[1].flops == full * 5 // 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        lambda x, w: F.conv2d(x, w, padding=1).square().sum(),
        lambda x, w: torch.bmm(x[0], x[1]),
        lambda x, w: torch.addmm(x[0, 0], x[0, 1], w[0, 0]) @ w[1, 1],
    ],
)
def test_products_and_convolutions_agree_with_pytorchs_counter(function: object) -> None:
    x, w = torch.ones(2, 4, 3, 3), torch.ones(5, 4, 3, 3)
    with FlopCounterMode(display=False) as counter:
        function(x, w)  # type: ignore[operator]
    ours = sum(cost.flops for cost in named_costs(function, x, w).values() if cost.is_heavy)
    assert ours == counter.get_total_flops()


def test_a_convolutions_backward_agrees_with_pytorchs_counter() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(F.conv2d(x, w, padding=1).sum(), (x, w))

    x, w = torch.ones(2, 4, 6, 6), torch.ones(5, 4, 3, 3)
    with FlopCounterMode(display=False) as counter:
        step(x, w)
    assert sum(cost.flops for cost in named_costs(step, x, w).values() if cost.is_heavy) == counter.get_total_flops()


def test_the_roofline_takes_the_longer_of_arithmetic_and_memory() -> None:
    h100 = cluster()
    flops, memory = h100.accelerator.flops_of(torch.bfloat16), 3.35e12 * 0.8
    assert op_us(OpCost(flops, 0, torch.bfloat16, True), h100) == pytest.approx(1e6)
    assert op_us(OpCost(flops, 2 * memory, torch.bfloat16, True), h100) == pytest.approx(2e6)
    # Light operations do not run on the tensor cores whose rate is known.
    assert op_us(OpCost(flops, 3 * memory, torch.bfloat16, False), h100) == pytest.approx(3e6)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_steps_know_their_units_and_what_they_read() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ unshard(a, 0, dtype=torch.bfloat16, rows=7).float().t()).relu()
        return y @ unshard(b, 1, rows=7), reduce_grad(x.t() @ x, 0)

    graph: fx.Graph = trace(function, torch.ones(1, 8), torch.ones(1, 8), torch.ones(4, 8)).graph
    gathers = bucket_all_gathers(graph, bucket_mode="coalesced")
    (reduction,) = bucket_reduce_scatters(graph, bucket_mode="coalesced")
    schedule_one_layer_ahead(graph, prefetch=1)
    lines = []
    for step in steps_of_graph(graph):
        mark = "free" if step.kind == "compute" and step.cost is None else ""
        mark += " cast" * step.is_cast + " of shards" * step.is_per_rank
        reads = " ".join(read.label for read in step.reads)
        lines.append(" ".join(f"{step.kind} {step.name} of {step.unit} {mark} {reads}".split()))
    assert_expected_inline(
        "\n".join(lines),
        """\
start all_gather_0 of 0
start all_gather_1 of 1
wait getitem of 0
compute _to_copy of 0 all_gather 0 (unit 0)
compute t of 0 free all_gather 0 (unit 0)
compute mm of 0 all_gather 0 (unit 0)
compute relu of 0
wait getitem_1 of 1
compute mm_1 of 1 all_gather 1 (unit 1)
compute mm_2 of 0
start reduce_scatter_0 of 0
wait getitem_2 of 0
compute mul_tensor of 0 cast of shards""",
    )
    assert [bucket.shapes for bucket in gathers] == [(ShardedShape(7, 16),), (ShardedShape(7, 32),)]
    assert reduction.shapes == (ShardedShape(8, 32),)
    assert [ShardedShape(7, 16).padded_rows(ranks) for ranks in (1, 2, 7, 8)] == [7, 8, 7, 8]
