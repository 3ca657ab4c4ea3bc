"""Golden forward graph of a three-layer transformer on 8 ranks, whole: before the first pass and after the last.

What each pass in between changes is a golden in that pass's own test.
"""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from tests.graphs import short, transformer_record

pytestmark = pytest.mark.usefixtures("eight_fake_ranks")


def test_forward_before_the_passes() -> None:
    forward, _ = transformer_record().graphs
    assert_expected_inline(
        short(forward.passes["insert_unshard"]),
        """\
primals_1: float32[2, 8] = input
primals_2: int64[4] = input
primals_3: float32[1] = input
primals_4: float32[1, 8] = input
primals_5: float32[1] = input
primals_6: float32[1, 8] = input
primals_7: float32[1] = input
primals_8: float32[1, 8] = input
primals_9: float32[1] = input
primals_10: float32[2, 8] = input
primals_11: int64[1] = input
primals_12: int64[1] = input
primals_13: int64[1] = input
primals_14: int64[1] = input
unshard: float32[10, 8] = unshard(primals_1, primals_11, 0, 10, 8, '0', '0', float32, float32, False)
embedding: float32[4, 8] = aten.embedding(unshard, primals_2)
unshard_1: float32[8] = unshard(primals_3, primals_12, 1, 8, 8, '0', '0', float32, float32, True)
native_layer_norm = aten.native_layer_norm(embedding, [8], unshard_1, None, 1e-05)
getitem: float32[4, 8] = getitem(native_layer_norm, 0)
getitem_1: float32[4, 1] = getitem(native_layer_norm, 1)
getitem_2: float32[4, 1] = getitem(native_layer_norm, 2)
unshard_2: float32[8, 8] = unshard(primals_4, primals_12, 1, 8, 8, '0', '0', float32, float32, True)
t: float32[8, 8] = aten.t(unshard_2)
mm: float32[4, 8] = aten.mm(getitem, t)
gelu: float32[4, 8] = aten.gelu(mm)
add: float32[4, 8] = aten.add.Tensor(embedding, gelu)
unshard_3: float32[8] = unshard(primals_5, primals_13, 2, 8, 8, '0', '0', float32, float32, True)
native_layer_norm_1 = aten.native_layer_norm(add, [8], unshard_3, None, 1e-05)
getitem_3: float32[4, 8] = getitem(native_layer_norm_1, 0)
getitem_4: float32[4, 1] = getitem(native_layer_norm_1, 1)
getitem_5: float32[4, 1] = getitem(native_layer_norm_1, 2)
unshard_4: float32[8, 8] = unshard(primals_6, primals_13, 2, 8, 8, '0', '0', float32, float32, True)
t_1: float32[8, 8] = aten.t(unshard_4)
mm_1: float32[4, 8] = aten.mm(getitem_3, t_1)
gelu_1: float32[4, 8] = aten.gelu(mm_1)
add_1: float32[4, 8] = aten.add.Tensor(add, gelu_1)
unshard_5: float32[8] = unshard(primals_7, primals_14, 3, 8, 8, '0', '0', float32, float32, True)
native_layer_norm_2 = aten.native_layer_norm(add_1, [8], unshard_5, None, 1e-05)
getitem_6: float32[4, 8] = getitem(native_layer_norm_2, 0)
getitem_7: float32[4, 1] = getitem(native_layer_norm_2, 1)
getitem_8: float32[4, 1] = getitem(native_layer_norm_2, 2)
unshard_6: float32[8, 8] = unshard(primals_8, primals_14, 3, 8, 8, '0', '0', float32, float32, True)
t_2: float32[8, 8] = aten.t(unshard_6)
mm_2: float32[4, 8] = aten.mm(getitem_6, t_2)
gelu_2: float32[4, 8] = aten.gelu(mm_2)
add_2: float32[4, 8] = aten.add.Tensor(add_1, gelu_2)
unshard_7: float32[8] = unshard(primals_9, primals_11, 0, 8, 8, '0', '0', float32, float32, False)
native_layer_norm_3 = aten.native_layer_norm(add_2, [8], unshard_7, None, 1e-05)
getitem_9: float32[4, 8] = getitem(native_layer_norm_3, 0)
getitem_10: float32[4, 1] = getitem(native_layer_norm_3, 1)
getitem_11: float32[4, 1] = getitem(native_layer_norm_3, 2)
unshard_8: float32[10, 8] = unshard(primals_10, primals_11, 0, 10, 8, '0', '0', float32, float32, False)
t_3: float32[8, 10] = aten.t(unshard_8)
mm_3: float32[4, 10] = aten.mm(getitem_9, t_3)
t_6: float32[10, 8] = aten.t(t_3)
return [mm_3, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, primals_8, primals_11, primals_12,
        primals_13, primals_14, embedding, getitem, getitem_1, getitem_2, mm, getitem_3, getitem_4, getitem_5, mm_1,
        add_1, getitem_6, getitem_7, getitem_8, mm_2, add_2, unshard_7, getitem_9, getitem_10, getitem_11, t_6]""",
    )


def test_forward_after_the_passes() -> None:
    forward, _ = transformer_record().graphs
    assert_expected_inline(
        short(forward.passes["annotate_regions"]),
        """\
primals_1: float32[2, 8] = input
primals_2: int64[4] = input
primals_3: float32[1] = input
primals_4: float32[1, 8] = input
primals_5: float32[1] = input
primals_6: float32[1, 8] = input
primals_7: float32[1] = input
primals_8: float32[1, 8] = input
primals_9: float32[1] = input
primals_10: float32[2, 8] = input
primals_11: int64[1] = input
primals_12: int64[1] = input
primals_13: int64[1] = input
primals_14: int64[1] = input
region_begin_default_5 = region_begin(primals_11, 'all_gather')
all_gather_0 = all_gather_ahead([primals_1], primals_11, 8, '0', float32, False, False)
region_end_default_5 = region_end(primals_11)
region_begin_default_6 = region_begin(primals_12, 'all_gather')
all_gather_1 = all_gather([primals_3, primals_4], primals_12, 8, '0', float32, False)
region_end_default_6 = region_end(primals_12)
getitem_12: float32[16, 8] = getitem(all_gather_0, 0)
wait_tensor_default: float32[16, 8] = wait_tensor(getitem_12)
slice_tensor: float32[10, 8] = aten.slice.Tensor(wait_tensor_default, 0, 0, 10)
region_begin_default = region_begin(primals_11, 'forward_compute')
embedding: float32[4, 8] = aten.embedding(slice_tensor, primals_2)
region_end_default = region_end(primals_11)
region_begin_default_7 = region_begin(primals_13, 'all_gather')
all_gather_2 = all_gather([primals_5, primals_6], primals_13, 8, '0', float32, False)
region_end_default_7 = region_end(primals_13)
getitem_13: float32[8] = getitem(all_gather_1, 0)
getitem_14: float32[8, 8] = getitem(all_gather_1, 1)
wait_tensor_default_1: float32[8] = wait_tensor(getitem_13)
wait_tensor_default_2: float32[8, 8] = wait_tensor(getitem_14)
region_begin_default_1 = region_begin(primals_12, 'forward_compute')
native_layer_norm = aten.native_layer_norm(embedding, [8], wait_tensor_default_1, None, 1e-05)
getitem: float32[4, 8] = getitem(native_layer_norm, 0)
getitem_1: float32[4, 1] = getitem(native_layer_norm, 1)
getitem_2: float32[4, 1] = getitem(native_layer_norm, 2)
t: float32[8, 8] = aten.t(wait_tensor_default_2)
mm: float32[4, 8] = aten.mm(getitem, t)
gelu: float32[4, 8] = aten.gelu(mm)
add: float32[4, 8] = aten.add.Tensor(embedding, gelu)
region_end_default_1 = region_end(primals_12)
region_begin_default_8 = region_begin(primals_14, 'all_gather')
all_gather_3 = all_gather([primals_7, primals_8], primals_14, 8, '0', float32, False)
region_end_default_8 = region_end(primals_14)
getitem_15: float32[8] = getitem(all_gather_2, 0)
getitem_16: float32[8, 8] = getitem(all_gather_2, 1)
wait_tensor_default_3: float32[8] = wait_tensor(getitem_15)
wait_tensor_default_4: float32[8, 8] = wait_tensor(getitem_16)
region_begin_default_2 = region_begin(primals_13, 'forward_compute')
native_layer_norm_1 = aten.native_layer_norm(add, [8], wait_tensor_default_3, None, 1e-05)
getitem_3: float32[4, 8] = getitem(native_layer_norm_1, 0)
getitem_4: float32[4, 1] = getitem(native_layer_norm_1, 1)
getitem_5: float32[4, 1] = getitem(native_layer_norm_1, 2)
t_1: float32[8, 8] = aten.t(wait_tensor_default_4)
mm_1: float32[4, 8] = aten.mm(getitem_3, t_1)
gelu_1: float32[4, 8] = aten.gelu(mm_1)
add_1: float32[4, 8] = aten.add.Tensor(add, gelu_1)
region_end_default_2 = region_end(primals_13)
region_begin_default_9 = region_begin(primals_11, 'all_gather')
all_gather_4 = all_gather([primals_9, primals_10], primals_11, 8, '0', float32, False)
region_end_default_9 = region_end(primals_11)
getitem_17: float32[8] = getitem(all_gather_3, 0)
getitem_18: float32[8, 8] = getitem(all_gather_3, 1)
wait_tensor_default_5: float32[8] = wait_tensor(getitem_17)
wait_tensor_default_6: float32[8, 8] = wait_tensor(getitem_18)
region_begin_default_3 = region_begin(primals_14, 'forward_compute')
native_layer_norm_2 = aten.native_layer_norm(add_1, [8], wait_tensor_default_5, None, 1e-05)
getitem_6: float32[4, 8] = getitem(native_layer_norm_2, 0)
getitem_7: float32[4, 1] = getitem(native_layer_norm_2, 1)
getitem_8: float32[4, 1] = getitem(native_layer_norm_2, 2)
t_2: float32[8, 8] = aten.t(wait_tensor_default_6)
mm_2: float32[4, 8] = aten.mm(getitem_6, t_2)
gelu_2: float32[4, 8] = aten.gelu(mm_2)
add_2: float32[4, 8] = aten.add.Tensor(add_1, gelu_2)
region_end_default_3 = region_end(primals_14)
start_next_graph_default = start_next_graph(primals_11)
getitem_19: float32[8] = getitem(all_gather_4, 0)
getitem_20: float32[16, 8] = getitem(all_gather_4, 1)
wait_tensor_default_7: float32[8] = wait_tensor(getitem_19)
wait_tensor_default_8: float32[16, 8] = wait_tensor(getitem_20)
slice_tensor_1: float32[10, 8] = aten.slice.Tensor(wait_tensor_default_8, 0, 0, 10)
region_begin_default_4 = region_begin(primals_11, 'forward_compute')
native_layer_norm_3 = aten.native_layer_norm(add_2, [8], wait_tensor_default_7, None, 1e-05)
getitem_9: float32[4, 8] = getitem(native_layer_norm_3, 0)
getitem_10: float32[4, 1] = getitem(native_layer_norm_3, 1)
getitem_11: float32[4, 1] = getitem(native_layer_norm_3, 2)
t_3: float32[8, 10] = aten.t(slice_tensor_1)
t_6: float32[10, 8] = aten.t(t_3)
mm_3: float32[4, 10] = aten.mm(getitem_9, t_3)
region_end_default_4 = region_end(primals_11)
return [mm_3, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, primals_8, primals_11, primals_12,
        primals_13, primals_14, embedding, getitem, getitem_1, getitem_2, mm, getitem_3, getitem_4, getitem_5, mm_1,
        add_1, getitem_6, getitem_7, getitem_8, mm_2, add_2, wait_tensor_default_7, getitem_9, getitem_10,
        getitem_11, t_6]""",
    )


def test_the_passes_run_in_this_order() -> None:
    for graph in transformer_record().graphs:
        assert list(graph.passes) == [
            "insert_unshard",
            "bucket_all_gathers",
            "bucket_reduce_scatters",
            "schedule_one_layer_ahead",
            "prefetch_across_graphs",
            "annotate_regions",
            "await_collectives",
        ]


def test_two_compilations_give_the_same_text() -> None:
    first = [graph.passes for graph in transformer_record().graphs]
    torch._dynamo.reset()
    assert [graph.passes for graph in transformer_record().graphs] == first
