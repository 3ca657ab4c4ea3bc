"""bucket_all_gathers: one all-gather per unit and dtype."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.pipeline import graph_text
from fsdp_passes.schedule import bucket_of
from tests.graphs import assert_keeps_values, changes, short, steps, trace, transformer_record, unshard
from tests.ranks import RankPool

WAIT = torch.ops._c10d_functional.wait_tensor.default


def two_weights(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
    return (x @ unshard(first, 0)).relu() @ unshard(second, 0)


def two_weights_graph() -> fx.Graph:
    return trace(two_weights, torch.ones(1, 8), torch.ones(1, 8), torch.ones(4, 8)).graph


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_forward() -> None:
    passes = transformer_record().graphs[0].passes
    assert_expected_inline(
        changes(passes["insert_unshard"], passes["bucket_all_gathers"]),
        """\
-unshard: float32[10, 8] = unshard(primals_1, primals_11, 0, 10, 8, '0', '0', float32, float32, False)
-embedding: float32[4, 8] = aten.embedding(unshard, primals_2)
-unshard_1: float32[8] = unshard(primals_3, primals_12, 1, 8, 8, '0', '0', float32, float32, True)
-native_layer_norm = aten.native_layer_norm(embedding, [8], unshard_1, None, 1e-05)
+all_gather_0 = all_gather([primals_1], primals_11, 8, '0', float32, False)
+getitem_12: float32[16, 8] = getitem(all_gather_0, 0)
+wait_tensor_default: float32[16, 8] = wait_tensor(getitem_12)
+slice_tensor: float32[10, 8] = aten.slice.Tensor(wait_tensor_default, 0, 0, 10)
+embedding: float32[4, 8] = aten.embedding(slice_tensor, primals_2)
+all_gather_1 = all_gather([primals_3, primals_4], primals_12, 8, '0', float32, False)
+getitem_13: float32[8] = getitem(all_gather_1, 0)
+getitem_14: float32[8, 8] = getitem(all_gather_1, 1)
+wait_tensor_default_1: float32[8] = wait_tensor(getitem_13)
+wait_tensor_default_2: float32[8, 8] = wait_tensor(getitem_14)
+native_layer_norm = aten.native_layer_norm(embedding, [8], wait_tensor_default_1, None, 1e-05)
-unshard_2: float32[8, 8] = unshard(primals_4, primals_12, 1, 8, 8, '0', '0', float32, float32, True)
-t: float32[8, 8] = aten.t(unshard_2)
+t: float32[8, 8] = aten.t(wait_tensor_default_2)
-unshard_3: float32[8] = unshard(primals_5, primals_13, 2, 8, 8, '0', '0', float32, float32, True)
-native_layer_norm_1 = aten.native_layer_norm(add, [8], unshard_3, None, 1e-05)
+all_gather_2 = all_gather([primals_5, primals_6], primals_13, 8, '0', float32, False)
+getitem_15: float32[8] = getitem(all_gather_2, 0)
+getitem_16: float32[8, 8] = getitem(all_gather_2, 1)
+wait_tensor_default_3: float32[8] = wait_tensor(getitem_15)
+wait_tensor_default_4: float32[8, 8] = wait_tensor(getitem_16)
+native_layer_norm_1 = aten.native_layer_norm(add, [8], wait_tensor_default_3, None, 1e-05)
-unshard_4: float32[8, 8] = unshard(primals_6, primals_13, 2, 8, 8, '0', '0', float32, float32, True)
-t_1: float32[8, 8] = aten.t(unshard_4)
+t_1: float32[8, 8] = aten.t(wait_tensor_default_4)
-unshard_5: float32[8] = unshard(primals_7, primals_14, 3, 8, 8, '0', '0', float32, float32, True)
-native_layer_norm_2 = aten.native_layer_norm(add_1, [8], unshard_5, None, 1e-05)
+all_gather_3 = all_gather([primals_7, primals_8], primals_14, 8, '0', float32, False)
+getitem_17: float32[8] = getitem(all_gather_3, 0)
+getitem_18: float32[8, 8] = getitem(all_gather_3, 1)
+wait_tensor_default_5: float32[8] = wait_tensor(getitem_17)
+wait_tensor_default_6: float32[8, 8] = wait_tensor(getitem_18)
+native_layer_norm_2 = aten.native_layer_norm(add_1, [8], wait_tensor_default_5, None, 1e-05)
-unshard_6: float32[8, 8] = unshard(primals_8, primals_14, 3, 8, 8, '0', '0', float32, float32, True)
-t_2: float32[8, 8] = aten.t(unshard_6)
+t_2: float32[8, 8] = aten.t(wait_tensor_default_6)
-unshard_7: float32[8] = unshard(primals_9, primals_11, 0, 8, 8, '0', '0', float32, float32, False)
-native_layer_norm_3 = aten.native_layer_norm(add_2, [8], unshard_7, None, 1e-05)
+all_gather_4 = all_gather([primals_9, primals_10], primals_11, 8, '0', float32, False)
+getitem_19: float32[8] = getitem(all_gather_4, 0)
+getitem_20: float32[16, 8] = getitem(all_gather_4, 1)
+wait_tensor_default_7: float32[8] = wait_tensor(getitem_19)
+wait_tensor_default_8: float32[16, 8] = wait_tensor(getitem_20)
+slice_tensor_1: float32[10, 8] = aten.slice.Tensor(wait_tensor_default_8, 0, 0, 10)
+native_layer_norm_3 = aten.native_layer_norm(add_2, [8], wait_tensor_default_7, None, 1e-05)
-unshard_8: float32[10, 8] = unshard(primals_10, primals_11, 0, 10, 8, '0', '0', float32, float32, False)
-t_3: float32[8, 10] = aten.t(unshard_8)
+t_3: float32[8, 10] = aten.t(slice_tensor_1)
-return [mm_3, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, primals_8, primals_11, primals_12,
        primals_13, primals_14, embedding, getitem, getitem_1, getitem_2, mm, getitem_3, getitem_4, getitem_5, mm_1,
        add_1, getitem_6, getitem_7, getitem_8, mm_2, add_2, unshard_7, getitem_9, getitem_10, getitem_11, t_6]
+return [mm_3, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, primals_8, primals_11, primals_12,
        primals_13, primals_14, embedding, getitem, getitem_1, getitem_2, mm, getitem_3, getitem_4, getitem_5, mm_1,
        add_1, getitem_6, getitem_7, getitem_8, mm_2, add_2, wait_tensor_default_7, getitem_9, getitem_10,
        getitem_11, t_6]""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_backward() -> None:
    passes = transformer_record().graphs[1].passes
    assert_expected_inline(
        changes(passes["insert_unshard"], passes["bucket_all_gathers"]),
        """\
-unshard_6: float32[8, 8] = unshard(primals_8, primals_14, 3, 8, 8, '0', '0', float32, float32, True)
-t_2: float32[8, 8] = aten.t(unshard_6)
+all_gather_0 = all_gather([primals_8, primals_7], primals_14, 8, '0', float32, False)
+getitem_23: float32[8, 8] = getitem(all_gather_0, 0)
+getitem_24: float32[8] = getitem(all_gather_0, 1)
+wait_tensor_default: float32[8, 8] = wait_tensor(getitem_23)
+wait_tensor_default_1: float32[8] = wait_tensor(getitem_24)
+t_2: float32[8, 8] = aten.t(wait_tensor_default)
-unshard_5: float32[8] = unshard(primals_7, primals_14, 3, 8, 8, '0', '0', float32, float32, True)
-native_layer_norm_backward_1 = aten.native_layer_norm_backward(mm_7, add_1, [8], getitem_7, getitem_8, unshard_5,
        None, [True, True, False])
+native_layer_norm_backward_1 = aten.native_layer_norm_backward(mm_7, add_1, [8], getitem_7, getitem_8,
        wait_tensor_default_1, None, [True, True, False])
-unshard_4: float32[8, 8] = unshard(primals_6, primals_13, 2, 8, 8, '0', '0', float32, float32, True)
-t_1: float32[8, 8] = aten.t(unshard_4)
+all_gather_1 = all_gather([primals_6, primals_5], primals_13, 8, '0', float32, False)
+getitem_25: float32[8, 8] = getitem(all_gather_1, 0)
+getitem_26: float32[8] = getitem(all_gather_1, 1)
+wait_tensor_default_2: float32[8, 8] = wait_tensor(getitem_25)
+wait_tensor_default_3: float32[8] = wait_tensor(getitem_26)
+t_1: float32[8, 8] = aten.t(wait_tensor_default_2)
-unshard_3: float32[8] = unshard(primals_5, primals_13, 2, 8, 8, '0', '0', float32, float32, True)
-native_layer_norm_backward_2 = aten.native_layer_norm_backward(mm_9, add, [8], getitem_4, getitem_5, unshard_3,
        None, [True, True, False])
+native_layer_norm_backward_2 = aten.native_layer_norm_backward(mm_9, add, [8], getitem_4, getitem_5,
        wait_tensor_default_3, None, [True, True, False])
-unshard_2: float32[8, 8] = unshard(primals_4, primals_12, 1, 8, 8, '0', '0', float32, float32, True)
-t: float32[8, 8] = aten.t(unshard_2)
+all_gather_2 = all_gather([primals_4, primals_3], primals_12, 8, '0', float32, False)
+getitem_27: float32[8, 8] = getitem(all_gather_2, 0)
+getitem_28: float32[8] = getitem(all_gather_2, 1)
+wait_tensor_default_4: float32[8, 8] = wait_tensor(getitem_27)
+wait_tensor_default_5: float32[8] = wait_tensor(getitem_28)
+t: float32[8, 8] = aten.t(wait_tensor_default_4)
-unshard_1: float32[8] = unshard(primals_3, primals_12, 1, 8, 8, '0', '0', float32, float32, True)
-native_layer_norm_backward_3 = aten.native_layer_norm_backward(mm_11, embedding, [8], getitem_1, getitem_2,
        unshard_1, None, [True, True, False])
+native_layer_norm_backward_3 = aten.native_layer_norm_backward(mm_11, embedding, [8], getitem_1, getitem_2,
        wait_tensor_default_5, None, [True, True, False])""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_packed() -> None:
    graph = two_weights_graph()
    bucket_all_gathers(graph, bucket_mode="packed")
    assert_expected_inline(
        short(graph_text(graph)),
        """\
first_1: float32[1, 8] = input
second_1: float32[1, 8] = input
x_1: float32[4, 8] = input
all_gather_0 = all_gather([first_1, second_1], None, 8, '0', float32, True)
getitem: float32[128] = getitem(all_gather_0, 0)
wait_tensor_default: float32[128] = wait_tensor(getitem)
view_default: float32[8, 16] = aten.view(wait_tensor_default, [8, -1])
slice_tensor: float32[8, 8] = aten.slice.Tensor(view_default, 1, 0, 8)
clone_default: float32[8, 8] = aten.clone(slice_tensor, memory_format=contiguous_format)
view_default_1: float32[8, 8] = aten.view(clone_default, [8, 8])
slice_tensor_1: float32[8, 8] = aten.slice.Tensor(view_default, 1, 8, 16)
clone_default_1: float32[8, 8] = aten.clone(slice_tensor_1, memory_format=contiguous_format)
view_default_2: float32[8, 8] = aten.view(clone_default_1, [8, 8])
mm: float32[4, 8] = aten.mm(x_1, view_default_1)
relu: float32[4, 8] = aten.relu(mm)
mm_1: float32[4, 8] = aten.mm(relu, view_default_2)
return mm_1""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_cast_before_the_gather_and_padding_behind_it() -> None:
    def function(shard: Tensor, x: Tensor) -> Tensor:
        return x @ unshard(shard, 0, rows=10, dtype=torch.bfloat16).t()

    graph = trace(function, torch.ones(2, 8), torch.ones(4, 8).bfloat16()).graph
    (bucket,) = bucket_all_gathers(graph, bucket_mode="coalesced")
    assert bucket.num_bytes == 16 * 8 * 2  # what travels: padded rows, in bfloat16
    assert_expected_inline(
        short(graph_text(graph)),
        """\
shard_1: float32[2, 8] = input
x_1: bfloat16[4, 8] = input
all_gather_0 = all_gather([shard_1], None, 8, '0', bfloat16, False)
getitem: bfloat16[16, 8] = getitem(all_gather_0, 0)
wait_tensor_default: bfloat16[16, 8] = wait_tensor(getitem)
slice_tensor: bfloat16[10, 8] = aten.slice.Tensor(wait_tensor_default, 0, 0, 10)
t: bfloat16[8, 10] = aten.t(slice_tensor)
mm: bfloat16[4, 10] = aten.mm(x_1, t)
return mm""",
    )


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
def test_without_unshard_nothing_changes(bucket_mode: str) -> None:
    graph = trace(lambda w, x: x @ w, torch.ones(8, 8), torch.ones(4, 8)).graph
    before = graph_text(graph)
    assert bucket_all_gathers(graph, bucket_mode=bucket_mode) == []
    assert graph_text(graph) == before


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_bucketing_again_changes_nothing(bucket_mode: str) -> None:
    graph = two_weights_graph()
    assert len(bucket_all_gathers(graph, bucket_mode=bucket_mode)) == 1
    before = graph_text(graph)
    assert bucket_all_gathers(graph, bucket_mode=bucket_mode) == []
    assert graph_text(graph) == before


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_two_dtypes_of_one_unit_are_two_buckets(bucket_mode: str) -> None:
    def function(norm: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return ((x * unshard(norm, 0)).bfloat16() @ unshard(weight, 0)).float() * unshard(norm, 0)

    graph = trace(function, torch.ones(1), torch.ones(1, 8).bfloat16(), torch.ones(4, 8)).graph
    buckets = bucket_all_gathers(graph, bucket_mode=bucket_mode)
    assert [(bucket.unit, bucket.dtype, bucket.num_params) for bucket in buckets] == [
        (0, torch.float32, 2),
        (0, torch.bfloat16, 1),
    ]
    assert [bucket.num_bytes for bucket in buckets] == [2 * 8 * 4, 8 * 8 * 2]


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_frozen_integer_weights_travel_in_a_bucket_of_their_own_and_are_not_cast(bucket_mode: str) -> None:
    def function(scale: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return x @ (unshard(weight, 0) * unshard(scale, 0))

    graph = trace(function, torch.ones(1), torch.ones(1, 8, dtype=torch.uint8), torch.ones(4, 8)).graph
    buckets = bucket_all_gathers(graph, bucket_mode=bucket_mode)
    assert [bucket.dtype for bucket in buckets] == [torch.uint8, torch.float32]
    assert not graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_units_are_gathered_separately_each_before_its_own_first_use(bucket_mode: str) -> None:
    def function(a0: Tensor, b: Tensor, a1: Tensor, x: Tensor) -> Tensor:
        return x @ unshard(a0, 0, reshard=False) @ unshard(b, 1) @ unshard(a1, 0, reshard=False)

    shard = torch.ones(1, 8)
    graph = trace(function, shard, shard, shard, torch.ones(4, 8)).graph
    bucket_all_gathers(graph, bucket_mode=bucket_mode)
    assert_expected_inline(
        steps(graph, only=("mm",)),
        """\
all_gather_0.start all_gather_0.wait mm all_gather_1.start all_gather_1.wait mm_1 all_gather_2.start
all_gather_2.wait mm_2""",
    )


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_every_start_is_awaited_and_all_waits_stand_together_before_the_first_use(bucket_mode: str) -> None:
    graph = two_weights_graph()
    bucket_all_gathers(graph, bucket_mode=bucket_mode)
    nodes = list(graph.nodes)
    waits = [index for index, node in enumerate(nodes) if node.target is WAIT]
    assert waits == list(range(waits[0], waits[0] + len(waits)))
    uses = [index for index, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default]
    assert max(waits) < min(uses)
    for node in nodes:
        if node.target is operator.getitem:
            assert [user.target for user in node.users] == [WAIT]


@pytest.mark.usefixtures("eight_fake_ranks")
def test_new_nodes_have_values_a_bucket_and_the_origin_of_what_they_replace() -> None:
    graph = two_weights_graph()
    (first, *_) = graph.find_nodes(op="call_function", target=torch.ops.fsdp_passes.unshard.default)
    first.meta["stack_trace"] = "the user's line"
    (bucket,) = bucket_all_gathers(graph, bucket_mode="packed")
    made = [node for node in graph.nodes if bucket_of(node) is not None]
    assert {bucket_of(node) for node in made} == {bucket}
    assert {node.meta["stack_trace"] for node in made} == {"the user's line"}
    assert all("val" in node.meta for node in made)
    assert made[-1].meta["val"].shape == (8, 8)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_graph_without_fake_values_is_refused() -> None:
    graph = two_weights_graph()
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = torch.empty(node.meta["val"].shape)
    with pytest.raises(AssertionError, match="unshard has no fake value"):
        bucket_all_gathers(graph, bucket_mode="coalesced")


def same_values(bucket_mode: str) -> None:
    """On two ranks: padded, cast, of two dtypes and in two units."""

    def gather(shard: Tensor, unit: int, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        return unshard(shard, unit, rows=rows, world_size=2, dtype=dtype)

    def function(even: Tensor, odd: Tensor, single: Tensor, whole: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = x @ gather(even, 0, 4) + gather(single, 0, 1)
        z = y.bfloat16() @ gather(odd, 1, 5, torch.bfloat16).t()
        return y, z, gather(whole, 1, 3) + 1

    torch.manual_seed(dist.get_rank())
    whole = torch.arange(4, dtype=torch.uint8).view(2, 2) + 10 * dist.get_rank()
    inputs = (torch.randn(2, 4), torch.randn(3, 4), torch.randn(1, 4), whole, torch.randn(6, 4))
    gm = trace(function, *inputs)
    assert_keeps_values(gm, inputs, lambda graph: bucket_all_gathers(graph, bucket_mode=bucket_mode))
    assert torch.equal(gm(*inputs)[2], torch.tensor([[1, 2], [3, 4], [11, 12]], dtype=torch.uint8))


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
def test_the_buckets_hold_the_values_that_the_operators_gather(two_ranks: RankPool, bucket_mode: str) -> None:
    two_ranks.run("tests.passes.test_bucket_all_gathers:same_values", bucket_mode=bucket_mode)
