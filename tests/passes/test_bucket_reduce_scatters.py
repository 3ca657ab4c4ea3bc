"""bucket_reduce_scatters: one reduce-scatter per unit and dtype, behind the unit's last gradient."""

from __future__ import annotations

import unittest.mock

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.pipeline import graph_text
from tests.graphs import assert_keeps_values, changes, reduce_grad, short, steps, trace, transformer_record
from tests.ranks import RankPool

aten = torch.ops.aten


def two_gradients(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first = reduce_grad(x.t() @ y, 0)
    return first, reduce_grad(y.t() @ y, 0)


def two_gradients_graph() -> fx.Graph:
    return trace(two_gradients, torch.ones(4, 8), torch.ones(4, 8)).graph


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_forward_is_unchanged() -> None:
    passes = transformer_record().graphs[0].passes
    assert changes(passes["bucket_all_gathers"], passes["bucket_reduce_scatters"]) == ""


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_backward() -> None:
    passes = transformer_record().graphs[1].passes
    assert_expected_inline(
        changes(passes["bucket_all_gathers"], passes["bucket_reduce_scatters"]),
        """\
-reduce_grad: float32[2, 8] = reduce_grad(t_7, primals_11, 0, 8, '0', float32, float32)
-reduce_grad_1: float32[1] = reduce_grad(getitem_13, primals_11, 0, 8, '0', float32, float32)
+constant_pad_nd_default: float32[16, 8] = aten.constant_pad_nd(t_7, [0, 0, 0, 6])
+reduce_scatter_0 = reduce_scatter([constant_pad_nd_default, getitem_13], 'sum', 8, '0')
+getitem_29: float32[2, 8] = getitem(reduce_scatter_0, 0)
+getitem_30: float32[1] = getitem(reduce_scatter_0, 1)
+wait_tensor_default_6: float32[2, 8] = wait_tensor(getitem_29)
+wait_tensor_default_7: float32[1] = wait_tensor(getitem_30)
+mul_tensor: float32[2, 8] = aten.mul.Tensor(wait_tensor_default_6, 0.125)
+mul_tensor_1: float32[1] = aten.mul.Tensor(wait_tensor_default_7, 0.125)
-reduce_grad_2: float32[1, 8] = reduce_grad(t_11, primals_14, 3, 8, '0', float32, float32)
-reduce_grad_3: float32[1] = reduce_grad(getitem_16, primals_14, 3, 8, '0', float32, float32)
+reduce_scatter_1 = reduce_scatter([t_11, getitem_16], 'sum', 8, '0')
+getitem_31: float32[1, 8] = getitem(reduce_scatter_1, 0)
+getitem_32: float32[1] = getitem(reduce_scatter_1, 1)
+wait_tensor_default_8: float32[1, 8] = wait_tensor(getitem_31)
+wait_tensor_default_9: float32[1] = wait_tensor(getitem_32)
+mul_tensor_2: float32[1, 8] = aten.mul.Tensor(wait_tensor_default_8, 0.125)
+mul_tensor_3: float32[1] = aten.mul.Tensor(wait_tensor_default_9, 0.125)
-reduce_grad_4: float32[1, 8] = reduce_grad(t_15, primals_13, 2, 8, '0', float32, float32)
-reduce_grad_5: float32[1] = reduce_grad(getitem_19, primals_13, 2, 8, '0', float32, float32)
+reduce_scatter_2 = reduce_scatter([t_15, getitem_19], 'sum', 8, '0')
+getitem_33: float32[1, 8] = getitem(reduce_scatter_2, 0)
+getitem_34: float32[1] = getitem(reduce_scatter_2, 1)
+wait_tensor_default_10: float32[1, 8] = wait_tensor(getitem_33)
+wait_tensor_default_11: float32[1] = wait_tensor(getitem_34)
+mul_tensor_4: float32[1, 8] = aten.mul.Tensor(wait_tensor_default_10, 0.125)
+mul_tensor_5: float32[1] = aten.mul.Tensor(wait_tensor_default_11, 0.125)
-reduce_grad_6: float32[1, 8] = reduce_grad(t_19, primals_12, 1, 8, '0', float32, float32)
-reduce_grad_7: float32[1] = reduce_grad(getitem_22, primals_12, 1, 8, '0', float32, float32)
+reduce_scatter_3 = reduce_scatter([t_19, getitem_22], 'sum', 8, '0')
+getitem_35: float32[1, 8] = getitem(reduce_scatter_3, 0)
+getitem_36: float32[1] = getitem(reduce_scatter_3, 1)
+wait_tensor_default_12: float32[1, 8] = wait_tensor(getitem_35)
+wait_tensor_default_13: float32[1] = wait_tensor(getitem_36)
+mul_tensor_6: float32[1, 8] = aten.mul.Tensor(wait_tensor_default_12, 0.125)
+mul_tensor_7: float32[1] = aten.mul.Tensor(wait_tensor_default_13, 0.125)
-reduce_grad_8: float32[2, 8] = reduce_grad(embedding_dense_backward, primals_11, 0, 8, '0', float32, float32)
-return [reduce_grad_8, None, reduce_grad_7, reduce_grad_6, reduce_grad_5, reduce_grad_4, reduce_grad_3,
        reduce_grad_2, reduce_grad_1, reduce_grad, None, None, None, None]
+constant_pad_nd_default_1: float32[16, 8] = aten.constant_pad_nd(embedding_dense_backward, [0, 0, 0, 6])
+reduce_scatter_4 = reduce_scatter([constant_pad_nd_default_1], 'sum', 8, '0')
+getitem_37: float32[2, 8] = getitem(reduce_scatter_4, 0)
+wait_tensor_default_14: float32[2, 8] = wait_tensor(getitem_37)
+mul_tensor_8: float32[2, 8] = aten.mul.Tensor(wait_tensor_default_14, 0.125)
+return [mul_tensor_8, None, mul_tensor_7, mul_tensor_6, mul_tensor_5, mul_tensor_4, mul_tensor_3, mul_tensor_2,
        mul_tensor_1, mul_tensor, None, None, None, None]""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_packed() -> None:
    graph = two_gradients_graph()
    bucket_reduce_scatters(graph, bucket_mode="packed")
    assert_expected_inline(
        short(graph_text(graph)),
        """\
x_1: float32[4, 8] = input
y_1: float32[4, 8] = input
t: float32[8, 4] = aten.t(x_1)
mm: float32[8, 8] = aten.mm(t, y_1)
t_1: float32[8, 4] = aten.t(y_1)
mm_1: float32[8, 8] = aten.mm(t_1, y_1)
reshape_default: float32[8, 8] = aten.reshape(mm, [8, -1])
reshape_default_1: float32[8, 8] = aten.reshape(mm_1, [8, -1])
cat_default: float32[8, 16] = aten.cat([reshape_default, reshape_default_1], 1)
view_default: float32[128] = aten.view(cat_default, [-1])
reduce_scatter_0: float32[16] = reduce_scatter_tensor(view_default, 'sum', 8, '0')
wait_tensor_default: float32[16] = wait_tensor(reduce_scatter_0)
slice_tensor: float32[8] = aten.slice.Tensor(wait_tensor_default, 0, 0, 8)
view_default_1: float32[1, 8] = aten.view(slice_tensor, [1, 8])
mul_tensor: float32[1, 8] = aten.mul.Tensor(view_default_1, 0.125)
slice_tensor_1: float32[8] = aten.slice.Tensor(wait_tensor_default, 0, 8, 16)
view_default_2: float32[1, 8] = aten.view(slice_tensor_1, [1, 8])
mul_tensor_1: float32[1, 8] = aten.mul.Tensor(view_default_2, 0.125)
return [mul_tensor, mul_tensor_1]""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_cast_and_padding_before_the_reduction_and_the_parameters_dtype_behind_it() -> None:
    def function(x: Tensor) -> Tensor:
        return reduce_grad(x.t() @ x, 0, dtype=torch.float32, out=torch.bfloat16)

    graph = trace(function, torch.ones(4, 10).bfloat16()).graph
    bucket_reduce_scatters(graph, bucket_mode="coalesced")
    assert_expected_inline(
        short(graph_text(graph)),
        """\
x_1: bfloat16[4, 10] = input
t: bfloat16[10, 4] = aten.t(x_1)
mm: bfloat16[10, 10] = aten.mm(t, x_1)
convert_element_type_default: float32[10, 10] = prims.convert_element_type(mm, float32)
constant_pad_nd_default: float32[16, 10] = aten.constant_pad_nd(convert_element_type_default, [0, 0, 0, 6])
reduce_scatter_0 = reduce_scatter([constant_pad_nd_default], 'sum', 8, '0')
getitem: float32[2, 10] = getitem(reduce_scatter_0, 0)
wait_tensor_default: float32[2, 10] = wait_tensor(getitem)
mul_tensor: float32[2, 10] = aten.mul.Tensor(wait_tensor_default, 0.125)
convert_element_type_default_1: bfloat16[2, 10] = prims.convert_element_type(mul_tensor, bfloat16)
return convert_element_type_default_1""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_buckets_bytes_are_those_on_the_wire() -> None:
    """Padding included, in the dtype of the reduction: as documented, and as the all-gathers count."""

    def function(x: Tensor) -> Tensor:
        return reduce_grad(x.t() @ x, 0, dtype=torch.float32, out=torch.bfloat16)

    (bucket,) = bucket_reduce_scatters(trace(function, torch.ones(4, 10).bfloat16()).graph, bucket_mode="coalesced")
    assert bucket.num_bytes == 16 * 10 * 4


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
def test_without_reduce_grad_nothing_changes(bucket_mode: str) -> None:
    graph = trace(lambda x: x.t() @ x, torch.ones(4, 8)).graph
    before = graph_text(graph)
    assert bucket_reduce_scatters(graph, bucket_mode=bucket_mode) == []
    assert graph_text(graph) == before


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_bucketing_again_changes_nothing(bucket_mode: str) -> None:
    graph = two_gradients_graph()
    assert len(bucket_reduce_scatters(graph, bucket_mode=bucket_mode)) == 1
    before = graph_text(graph)
    assert bucket_reduce_scatters(graph, bucket_mode=bucket_mode) == []
    assert graph_text(graph) == before


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_backend_that_averages_needs_no_scaling(bucket_mode: str) -> None:
    graph = two_gradients_graph()
    with unittest.mock.patch("fsdp_passes.division.group_averages", return_value=True):
        bucket_reduce_scatters(graph, bucket_mode=bucket_mode)
    (start,) = [node for node in graph.nodes if node.name == "reduce_scatter_0"]
    assert start.args[1] == "avg"
    assert not graph.find_nodes(op="call_function", target=aten.mul.Tensor)


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_gradients_that_are_not_contiguous_are_copied_first(bucket_mode: str) -> None:
    """A collective reads its inputs as flat memory: a transposed gradient would be reduced in the wrong order."""
    graph = trace(lambda x: reduce_grad((x.t() @ x[:, :4]).t(), 0, world_size=4), torch.ones(4, 8)).graph
    bucket_reduce_scatters(graph, bucket_mode=bucket_mode)
    (copy,) = graph.find_nodes(op="call_function", target=aten.clone.default)
    assert copy.meta["val"].is_contiguous()
    assert not copy.all_input_nodes[0].meta["val"].is_contiguous()


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_units_are_reduced_separately_each_run_behind_its_last_gradient(bucket_mode: str) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        late = reduce_grad(x.t() @ y, 0)
        early = reduce_grad(y.t() @ y, 1)
        return late, early, reduce_grad(y.t() @ x, 0)

    graph = trace(function, torch.ones(4, 8), torch.ones(4, 8)).graph
    buckets = bucket_reduce_scatters(graph, bucket_mode=bucket_mode)
    assert [(bucket.index, bucket.unit, bucket.num_params) for bucket in buckets] == [(0, 0, 1), (1, 1, 1), (2, 0, 1)]
    assert_expected_inline(
        steps(graph, only=("mm",)),
        """\
mm reduce_scatter_0.start reduce_scatter_0.wait mm_1 reduce_scatter_1.start reduce_scatter_1.wait mm_2
reduce_scatter_2.start reduce_scatter_2.wait""",
    )


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_two_reduction_dtypes_of_one_unit_are_two_buckets(bucket_mode: str) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return reduce_grad(x, 0), reduce_grad(y, 0, dtype=torch.bfloat16)

    graph = trace(function, torch.ones(8, 8), torch.ones(8, 8)).graph
    assert [b.dtype for b in bucket_reduce_scatters(graph, bucket_mode=bucket_mode)] == [torch.float32, torch.bfloat16]


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_graph_without_fake_values_is_refused() -> None:
    graph = two_gradients_graph()
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = torch.empty(node.meta["val"].shape)
    with pytest.raises(AssertionError, match="reduce_grad_1 has no fake value"):
        bucket_reduce_scatters(graph, bucket_mode="coalesced")


def same_values(bucket_mode: str) -> None:
    """On two ranks: padded, cast, transposed, one row, of two dtypes and in two units; the mean is right."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        odd = reduce_grad(x.t() @ y, 0, world_size=2)
        cast = reduce_grad((y.t() @ y).bfloat16(), 1, world_size=2, dtype=torch.float32)
        single = reduce_grad(x.sum(dim=(0, 1), keepdim=True), 0, world_size=2)
        narrow = reduce_grad(y, 0, world_size=2, dtype=torch.bfloat16, out=torch.float32)
        return odd, cast, single, narrow, reduce_grad((x.t() @ y[:, :4]).t(), 1, world_size=2)

    rank = dist.get_rank()
    torch.manual_seed(0)
    batches = [(torch.randn(6, 5), torch.randn(6, 6)) for _ in range(2)]
    gm = trace(function, *batches[rank])
    assert_keeps_values(gm, batches[rank], lambda graph: bucket_reduce_scatters(graph, bucket_mode=bucket_mode))
    odd, _, single, *_ = gm(*batches[rank])
    mean = sum(x.t() @ y for x, y in batches) / 2
    torch.testing.assert_close(odd, torch.cat([mean, torch.zeros(1, 6)]).chunk(2)[rank], rtol=0, atol=1e-5)
    total = sum(x.sum() for x, _ in batches) / 2 * (1 - rank)  # the second rank holds the padding
    torch.testing.assert_close(single, total.view(1, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
def test_the_buckets_hold_the_values_that_the_operators_reduce(two_ranks: RankPool, bucket_mode: str) -> None:
    two_ranks.run("tests.passes.test_bucket_reduce_scatters:same_values", bucket_mode=bucket_mode)
