"""schedule_one_layer_ahead: each collective lies where something hides it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.passes.schedule_one_layer_ahead import schedule_one_layer_ahead
from fsdp_passes.pipeline import graph_text
from tests.graphs import assert_keeps_values, reduce_grad, steps, trace, transformer_record, unshard
from tests.ranks import RankPool

c10d = torch.ops._c10d_functional


def bucketed(function: object, *inputs: Tensor, bucket_mode: str = "coalesced") -> fx.Graph:
    graph = trace(function, *inputs).graph
    bucket_all_gathers(graph, bucket_mode=bucket_mode)
    bucket_reduce_scatters(graph, bucket_mode=bucket_mode)
    return graph


def scheduled(function: object, *inputs: Tensor, prefetch: int = 1) -> str:
    graph = bucketed(function, *inputs)
    schedule_one_layer_ahead(graph, prefetch=prefetch)
    graph.lint()
    return steps(graph)


SHARD, X = torch.ones(1, 8), torch.ones(4, 8)


def four_units(a: Tensor, b: Tensor, c: Tensor, d: Tensor, x: Tensor) -> Tensor:
    for unit, shard in enumerate((a, b, c, d)):
        x = (x @ unshard(shard, unit)).relu()
    return x


# ---- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_only_the_order_changes(prefetch: int) -> None:
    for graph in transformer_record(prefetch=prefetch).graphs:
        before, after = graph.passes["bucket_reduce_scatters"], graph.passes["schedule_one_layer_ahead"]
        assert before != after
        assert sorted(before.splitlines()) == sorted(after.splitlines())


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_forward() -> None:
    passes = transformer_record().graphs[0].passes
    assert_expected_inline(
        steps(passes["schedule_one_layer_ahead"]),
        """\
all_gather_0.start all_gather_1.start all_gather_0.wait embedding all_gather_2.start all_gather_1.wait
native_layer_norm mm gelu add all_gather_3.start all_gather_2.wait native_layer_norm_1 mm_1 gelu_1 add_1
all_gather_4.start all_gather_3.wait native_layer_norm_2 mm_2 gelu_2 add_2 all_gather_4.wait
native_layer_norm_3 mm_3""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_backward() -> None:
    passes = transformer_record().graphs[1].passes
    assert_expected_inline(
        steps(passes["schedule_one_layer_ahead"]),
        """\
all_gather_0.start all_gather_1.start mm_4 mm_5 native_layer_norm_backward gelu_backward
reduce_scatter_0.start mm_6 all_gather_0.wait mm_7 native_layer_norm_backward_1 add_3 gelu_backward_1
all_gather_2.start reduce_scatter_1.start reduce_scatter_0.wait mm_8 all_gather_1.wait mm_9 gelu add
native_layer_norm_backward_2 add_4 gelu_backward_2 reduce_scatter_2.start reduce_scatter_1.wait mm_10
all_gather_2.wait mm_11 native_layer_norm_backward_3 reduce_scatter_3.start reduce_scatter_2.wait add_5
embedding_dense_backward reduce_scatter_4.start reduce_scatter_3.wait reduce_scatter_4.wait""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_forward_two_layers_ahead() -> None:
    passes = transformer_record(prefetch=2).graphs[0].passes
    assert_expected_inline(
        steps(passes["schedule_one_layer_ahead"]),
        """\
all_gather_0.start all_gather_1.start all_gather_2.start all_gather_0.wait embedding all_gather_3.start
all_gather_1.wait native_layer_norm mm gelu add all_gather_4.start all_gather_2.wait native_layer_norm_1 mm_1
gelu_1 add_1 all_gather_3.wait native_layer_norm_2 mm_2 gelu_2 add_2 all_gather_4.wait native_layer_norm_3
mm_3""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_backward_two_layers_ahead() -> None:
    passes = transformer_record(prefetch=2).graphs[1].passes
    assert_expected_inline(
        steps(passes["schedule_one_layer_ahead"]),
        """\
all_gather_0.start all_gather_1.start all_gather_2.start mm_4 mm_5 native_layer_norm_backward gelu_backward
reduce_scatter_0.start mm_6 all_gather_0.wait mm_7 native_layer_norm_backward_1 add_3 gelu_backward_1
reduce_scatter_1.start reduce_scatter_0.wait mm_8 all_gather_1.wait mm_9 gelu add native_layer_norm_backward_2
add_4 gelu_backward_2 reduce_scatter_2.start reduce_scatter_1.wait mm_10 all_gather_2.wait mm_11
native_layer_norm_backward_3 reduce_scatter_3.start reduce_scatter_2.wait add_5 embedding_dense_backward
reduce_scatter_4.start reduce_scatter_3.wait reduce_scatter_4.wait""",
    )


# ---- gathers, in graphs written by hand ------------------------------------------------------------------------------


@pytest.mark.usefixtures("eight_fake_ranks")
def test_one_unit_ahead() -> None:
    assert_expected_inline(
        scheduled(four_units, SHARD, SHARD, SHARD, SHARD, X),
        """\
all_gather_0.start all_gather_1.start all_gather_0.wait mm relu all_gather_2.start all_gather_1.wait mm_1
relu_1 all_gather_3.start all_gather_2.wait mm_2 relu_2 all_gather_3.wait mm_3 relu_3""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_two_units_ahead() -> None:
    assert_expected_inline(
        scheduled(four_units, SHARD, SHARD, SHARD, SHARD, X, prefetch=2),
        """\
all_gather_0.start all_gather_1.start all_gather_2.start all_gather_0.wait mm relu all_gather_3.start
all_gather_1.wait mm_1 relu_1 all_gather_2.wait mm_2 relu_2 all_gather_3.wait mm_3 relu_3""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_further_ahead_than_there_are_units() -> None:
    assert_expected_inline(
        scheduled(four_units, SHARD, SHARD, SHARD, SHARD, X, prefetch=9),
        """\
all_gather_0.start all_gather_1.start all_gather_2.start all_gather_3.start all_gather_0.wait mm relu
all_gather_1.wait mm_1 relu_1 all_gather_2.wait mm_2 relu_2 all_gather_3.wait mm_3 relu_3""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_first_gather_is_hidden_by_what_runs_before_its_unit() -> None:
    assert_expected_inline(
        scheduled(lambda shard, w, x: x @ w @ unshard(shard, 0), SHARD, torch.ones(8, 8), X),
        """all_gather_0.start mm all_gather_0.wait mm_1""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_one_unit_alone() -> None:
    assert_expected_inline(
        scheduled(lambda shard, x: x @ unshard(shard, 0), SHARD, X),
        """all_gather_0.start all_gather_0.wait mm""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_unit_that_is_read_again_later_is_gathered_once() -> None:
    def function(embed: Tensor, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        weight = unshard(embed, 0, reshard=False)
        return x @ weight @ unshard(a, 1) @ unshard(b, 2) @ weight.t()

    assert_expected_inline(
        scheduled(function, SHARD, SHARD, SHARD, X),
        """\
all_gather_0.start all_gather_1.start all_gather_0.wait mm all_gather_2.start all_gather_1.wait mm_1
all_gather_2.wait mm_2 mm_3""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_two_units_that_one_step_reads_are_awaited_before_it() -> None:
    assert_expected_inline(
        scheduled(lambda a, b, c, x: x @ (unshard(a, 0) + unshard(b, 1)) @ unshard(c, 2), SHARD, SHARD, SHARD, X),
        """\
all_gather_0.start all_gather_1.start all_gather_2.start all_gather_0.wait all_gather_1.wait add mm
all_gather_2.wait mm_1""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_both_dtypes_of_a_unit_go_together() -> None:
    def function(norm: Tensor, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        y = (x * unshard(norm, 0)).bfloat16() @ unshard(a, 0)
        return y @ unshard(b, 1)

    half = SHARD.bfloat16()
    assert_expected_inline(
        scheduled(function, torch.ones(1), half, half, X),
        """\
all_gather_0.start all_gather_1.start all_gather_2.start all_gather_0.wait _to_copy all_gather_1.wait mm
all_gather_2.wait mm_1""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_gather_that_only_the_output_reads_comes_last() -> None:
    assert_expected_inline(
        scheduled(lambda a, b, x: (unshard(a, 0), x @ unshard(b, 1)), SHARD, SHARD, X),
        """all_gather_1.start all_gather_0.start all_gather_1.wait mm all_gather_0.wait""",
    )


# ---- reductions ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_reduction_starts_at_its_last_gradient_and_is_awaited_behind_the_next_one() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [reduce_grad(x.t() @ y * (unit + 1.5), unit) for unit in range(3)]

    assert_expected_inline(
        scheduled(function, X, X),
        """\
mm reduce_scatter_0.start mm_1 reduce_scatter_1.start reduce_scatter_0.wait mm_2 reduce_scatter_2.start
reduce_scatter_1.wait reduce_scatter_2.wait""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_at_a_boundary_the_gather_goes_before_the_reduction() -> None:
    """Somebody waits for the gather soon; on one stream it would queue behind a reduction that nobody waits for."""

    def function(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grad = reduce_grad(x.t() @ x, 2)
        return grad, x @ unshard(a, 1) @ unshard(b, 0)

    assert_expected_inline(
        scheduled(function, SHARD, SHARD, X),
        """\
all_gather_0.start all_gather_1.start mm reduce_scatter_0.start all_gather_0.wait mm_1 all_gather_1.wait mm_2
reduce_scatter_0.wait""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_reduction_with_compute_before_the_boundary_starts_at_once() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grad = reduce_grad(x.t() @ x, 2)
        return grad, x @ x.t() @ x @ unshard(a, 1) @ unshard(b, 0)

    assert_expected_inline(
        scheduled(function, SHARD, SHARD, X),
        """\
all_gather_0.start all_gather_1.start mm reduce_scatter_0.start mm_1 mm_2 all_gather_0.wait mm_3
all_gather_1.wait mm_4 reduce_scatter_0.wait""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_gradients_that_are_graph_inputs_are_reduced_first() -> None:
    assert_expected_inline(
        scheduled(lambda grad, a, x: (reduce_grad(grad, 1), x @ unshard(a, 0)), torch.ones(8, 8), SHARD, X),
        """all_gather_0.start reduce_scatter_0.start all_gather_0.wait mm reduce_scatter_0.wait""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_step_that_reads_a_reduced_gradient_comes_behind_its_wait() -> None:
    def function(x: Tensor) -> Tensor:
        grad = reduce_grad(x.t() @ x, 0)
        return (x @ x.t()).sum() + (grad @ grad.t()).sum()

    assert_expected_inline(
        scheduled(function, X),
        """mm reduce_scatter_0.start mm_1 sum_1 reduce_scatter_0.wait mm_2 sum_2 add""",
    )


# ---- what does not change --------------------------------------------------------------------------------------------


def order_of(graph: fx.Graph, *targets: object) -> list[str]:
    return [node.name for node in graph.nodes if node.target in targets]


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_compute_and_the_users_own_collectives_keep_their_order(prefetch: int) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
        early = c10d.all_reduce(x, "sum", "0")
        x = x @ unshard(a, 0)
        late = c10d.all_reduce(x * 2, "sum", "0")
        x = c10d.wait_tensor(early) + x @ unshard(b, 1)
        return (c10d.wait_tensor(late) + x) @ unshard(c, 2)

    graph = bucketed(function, SHARD, SHARD, SHARD, X)
    kinds = (torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, c10d.all_reduce.default)
    before = order_of(graph, *kinds)
    schedule_one_layer_ahead(graph, prefetch=prefetch)
    graph.lint()
    assert order_of(graph, *kinds) == before
    users_waits = [node.name for node in graph.nodes if node.args and "all_reduce" in str(node.args[0])]
    assert users_waits == ["wait_tensor", "wait_tensor_1"]


@pytest.mark.usefixtures("eight_fake_ranks")
def test_steps_of_the_forward_that_only_the_backward_reads_run_with_what_they_are_made_from() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = x @ unshard(a, 0)
        z = y @ unshard(b, 1)
        return z, y > 0  # as the partitioner leaves it: at the end

    assert_expected_inline(
        scheduled(function, SHARD, SHARD, X),
        """all_gather_0.start all_gather_1.start all_gather_0.wait mm gt all_gather_1.wait mm_1""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_step_with_several_results_that_only_the_backward_reads_takes_them_with_it() -> None:
    def function(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = x @ unshard(a, 0)
        z = y @ unshard(b, 1)
        var, mean = torch.var_mean(y, 1)
        return z, mean / var

    assert_expected_inline(
        scheduled(function, SHARD, SHARD, X),
        """all_gather_0.start all_gather_1.start all_gather_0.wait mm var_mean div all_gather_1.wait mm_1""",
    )


def test_without_buckets_nothing_changes() -> None:
    graph = trace(lambda w, x: (x @ w).relu() @ w, torch.ones(8, 8), X).graph
    before = graph_text(graph)
    assert schedule_one_layer_ahead(graph, prefetch=1) is False
    assert graph_text(graph) == before


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_scheduling_again_changes_nothing(prefetch: int) -> None:
    graph = bucketed(four_units, SHARD, SHARD, SHARD, SHARD, X)
    assert schedule_one_layer_ahead(graph, prefetch=prefetch) is True
    before = graph_text(graph)
    assert schedule_one_layer_ahead(graph, prefetch=prefetch) is False
    assert graph_text(graph) == before


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_wait_whose_start_is_missing_is_refused() -> None:
    graph = bucketed(lambda x: (reduce_grad(x.t() @ x, 0), reduce_grad(x.t() @ (x + 1), 1)), X)
    (start,) = [node for node in graph.nodes if node.name == "reduce_scatter_0"]
    start.meta.clear()
    with pytest.raises(AssertionError, match="a node was lost while scheduling"):
        schedule_one_layer_ahead(graph, prefetch=1)


def same_values(prefetch: int, bucket_mode: str) -> None:
    """On two ranks: a forward and a backward with gathers and reductions, executed before and after."""

    def function(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        weights = [unshard(shard, unit, rows=5, world_size=2) for unit, shard in enumerate((a, b, c))]
        y = (x @ weights[0]).tanh()
        z = (y @ weights[1]).tanh()
        grad = z @ weights[2]
        third = reduce_grad(z.t() @ grad, 2, world_size=2)
        grad = grad @ weights[1].t()
        second = reduce_grad(y.t() @ grad, 1, world_size=2)
        return grad @ weights[0].t(), third, second, reduce_grad(x.t() @ grad, 0, world_size=2)

    def lower(graph: fx.Graph) -> None:
        bucket_all_gathers(graph, bucket_mode=bucket_mode)
        bucket_reduce_scatters(graph, bucket_mode=bucket_mode)
        assert schedule_one_layer_ahead(graph, prefetch=prefetch)

    torch.manual_seed(dist.get_rank())
    inputs = [torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5), torch.randn(4, 5)]
    assert_keeps_values(trace(function, *inputs), inputs, lower)


@pytest.mark.parametrize(("prefetch", "bucket_mode"), [(1, "coalesced"), (2, "coalesced"), (1, "packed")])
def test_the_scheduled_graph_computes_the_same_values(two_ranks: RankPool, prefetch: int, bucket_mode: str) -> None:
    two_ranks.run("tests.passes.test_schedule_one_layer_ahead:same_values", prefetch=prefetch, bucket_mode=bucket_mode)
