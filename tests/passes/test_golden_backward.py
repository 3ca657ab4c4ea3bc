"""Golden backward graph of a three-layer transformer on 8 ranks, whole: before the first pass and after the last.

What each pass in between changes is a golden in that pass's own test.
"""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from tests.graphs import short, transformer_record

pytestmark = pytest.mark.usefixtures("eight_fake_ranks")


def test_backward_before_the_passes() -> None:
    _, backward = transformer_record().graphs
    assert_expected_inline(
        short(backward.passes["insert_unshard"]),
        """\
primals_2: int64[4] = input
primals_3: float32[1] = input
primals_4: float32[1, 8] = input
primals_5: float32[1] = input
primals_6: float32[1, 8] = input
primals_7: float32[1] = input
primals_8: float32[1, 8] = input
primals_11: int64[1] = input
primals_12: int64[1] = input
primals_13: int64[1] = input
primals_14: int64[1] = input
embedding: float32[4, 8] = input
getitem: float32[4, 8] = input
getitem_1: float32[4, 1] = input
getitem_2: float32[4, 1] = input
mm: float32[4, 8] = input
getitem_3: float32[4, 8] = input
getitem_4: float32[4, 1] = input
getitem_5: float32[4, 1] = input
mm_1: float32[4, 8] = input
add_1: float32[4, 8] = input
getitem_6: float32[4, 8] = input
getitem_7: float32[4, 1] = input
getitem_8: float32[4, 1] = input
mm_2: float32[4, 8] = input
add_2: float32[4, 8] = input
unshard_7: float32[8] = input
getitem_9: float32[4, 8] = input
getitem_10: float32[4, 1] = input
getitem_11: float32[4, 1] = input
t_6: float32[10, 8] = input
tangents_1: float32[4, 10] = input
t_4: float32[10, 4] = aten.t(tangents_1)
mm_4: float32[10, 8] = aten.mm(t_4, getitem_9)
t_5: float32[8, 10] = aten.t(mm_4)
mm_5: float32[4, 8] = aten.mm(tangents_1, t_6)
t_7: float32[10, 8] = aten.t(t_5)
reduce_grad: float32[2, 8] = reduce_grad(t_7, primals_11, 0, 8, '0', float32, float32)
native_layer_norm_backward = aten.native_layer_norm_backward(mm_5, add_2, [8], getitem_10, getitem_11, unshard_7,
        None, [True, True, False])
getitem_12: float32[4, 8] = getitem(native_layer_norm_backward, 0)
getitem_13: float32[8] = getitem(native_layer_norm_backward, 1)
reduce_grad_1: float32[1] = reduce_grad(getitem_13, primals_11, 0, 8, '0', float32, float32)
gelu_backward: float32[4, 8] = aten.gelu_backward(getitem_12, mm_2)
t_8: float32[8, 4] = aten.t(gelu_backward)
mm_6: float32[8, 8] = aten.mm(t_8, getitem_6)
t_9: float32[8, 8] = aten.t(mm_6)
unshard_6: float32[8, 8] = unshard(primals_8, primals_14, 3, 8, 8, '0', '0', float32, float32, True)
t_2: float32[8, 8] = aten.t(unshard_6)
t_10: float32[8, 8] = aten.t(t_2)
mm_7: float32[4, 8] = aten.mm(gelu_backward, t_10)
t_11: float32[8, 8] = aten.t(t_9)
reduce_grad_2: float32[1, 8] = reduce_grad(t_11, primals_14, 3, 8, '0', float32, float32)
unshard_5: float32[8] = unshard(primals_7, primals_14, 3, 8, 8, '0', '0', float32, float32, True)
native_layer_norm_backward_1 = aten.native_layer_norm_backward(mm_7, add_1, [8], getitem_7, getitem_8, unshard_5,
        None, [True, True, False])
getitem_15: float32[4, 8] = getitem(native_layer_norm_backward_1, 0)
getitem_16: float32[8] = getitem(native_layer_norm_backward_1, 1)
add_3: float32[4, 8] = aten.add.Tensor(getitem_12, getitem_15)
reduce_grad_3: float32[1] = reduce_grad(getitem_16, primals_14, 3, 8, '0', float32, float32)
gelu_backward_1: float32[4, 8] = aten.gelu_backward(add_3, mm_1)
t_12: float32[8, 4] = aten.t(gelu_backward_1)
mm_8: float32[8, 8] = aten.mm(t_12, getitem_3)
t_13: float32[8, 8] = aten.t(mm_8)
unshard_4: float32[8, 8] = unshard(primals_6, primals_13, 2, 8, 8, '0', '0', float32, float32, True)
t_1: float32[8, 8] = aten.t(unshard_4)
t_14: float32[8, 8] = aten.t(t_1)
mm_9: float32[4, 8] = aten.mm(gelu_backward_1, t_14)
t_15: float32[8, 8] = aten.t(t_13)
reduce_grad_4: float32[1, 8] = reduce_grad(t_15, primals_13, 2, 8, '0', float32, float32)
gelu: float32[4, 8] = aten.gelu(mm)
add: float32[4, 8] = aten.add.Tensor(embedding, gelu)
unshard_3: float32[8] = unshard(primals_5, primals_13, 2, 8, 8, '0', '0', float32, float32, True)
native_layer_norm_backward_2 = aten.native_layer_norm_backward(mm_9, add, [8], getitem_4, getitem_5, unshard_3,
        None, [True, True, False])
getitem_18: float32[4, 8] = getitem(native_layer_norm_backward_2, 0)
getitem_19: float32[8] = getitem(native_layer_norm_backward_2, 1)
add_4: float32[4, 8] = aten.add.Tensor(add_3, getitem_18)
reduce_grad_5: float32[1] = reduce_grad(getitem_19, primals_13, 2, 8, '0', float32, float32)
gelu_backward_2: float32[4, 8] = aten.gelu_backward(add_4, mm)
t_16: float32[8, 4] = aten.t(gelu_backward_2)
mm_10: float32[8, 8] = aten.mm(t_16, getitem)
t_17: float32[8, 8] = aten.t(mm_10)
unshard_2: float32[8, 8] = unshard(primals_4, primals_12, 1, 8, 8, '0', '0', float32, float32, True)
t: float32[8, 8] = aten.t(unshard_2)
t_18: float32[8, 8] = aten.t(t)
mm_11: float32[4, 8] = aten.mm(gelu_backward_2, t_18)
t_19: float32[8, 8] = aten.t(t_17)
reduce_grad_6: float32[1, 8] = reduce_grad(t_19, primals_12, 1, 8, '0', float32, float32)
unshard_1: float32[8] = unshard(primals_3, primals_12, 1, 8, 8, '0', '0', float32, float32, True)
native_layer_norm_backward_3 = aten.native_layer_norm_backward(mm_11, embedding, [8], getitem_1, getitem_2,
        unshard_1, None, [True, True, False])
getitem_21: float32[4, 8] = getitem(native_layer_norm_backward_3, 0)
getitem_22: float32[8] = getitem(native_layer_norm_backward_3, 1)
add_5: float32[4, 8] = aten.add.Tensor(add_4, getitem_21)
reduce_grad_7: float32[1] = reduce_grad(getitem_22, primals_12, 1, 8, '0', float32, float32)
embedding_dense_backward: float32[10, 8] = aten.embedding_dense_backward(add_5, primals_2, 10, -1, False)
reduce_grad_8: float32[2, 8] = reduce_grad(embedding_dense_backward, primals_11, 0, 8, '0', float32, float32)
return [reduce_grad_8, None, reduce_grad_7, reduce_grad_6, reduce_grad_5, reduce_grad_4, reduce_grad_3,
        reduce_grad_2, reduce_grad_1, reduce_grad, None, None, None, None]""",
    )


def test_backward_after_the_passes() -> None:
    _, backward = transformer_record().graphs
    assert_expected_inline(
        short(backward.passes["annotate_regions"]),
        """\
primals_2: int64[4] = input
primals_3: float32[1] = input
primals_4: float32[1, 8] = input
primals_5: float32[1] = input
primals_6: float32[1, 8] = input
primals_7: float32[1] = input
primals_8: float32[1, 8] = input
primals_11: int64[1] = input
primals_12: int64[1] = input
primals_13: int64[1] = input
primals_14: int64[1] = input
embedding: float32[4, 8] = input
getitem: float32[4, 8] = input
getitem_1: float32[4, 1] = input
getitem_2: float32[4, 1] = input
mm: float32[4, 8] = input
getitem_3: float32[4, 8] = input
getitem_4: float32[4, 1] = input
getitem_5: float32[4, 1] = input
mm_1: float32[4, 8] = input
add_1: float32[4, 8] = input
getitem_6: float32[4, 8] = input
getitem_7: float32[4, 1] = input
getitem_8: float32[4, 1] = input
mm_2: float32[4, 8] = input
add_2: float32[4, 8] = input
unshard_7: float32[8] = input
getitem_9: float32[4, 8] = input
getitem_10: float32[4, 1] = input
getitem_11: float32[4, 1] = input
t_6: float32[10, 8] = input
tangents_1: float32[4, 10] = input
region_begin_default_5 = region_begin(primals_14, 'all_gather')
all_gather_0 = all_gather_ahead([primals_8, primals_7], primals_14, 8, '0', float32, False, True)
region_end_default_5 = region_end(primals_14)
region_begin_default_6 = region_begin(primals_13, 'all_gather')
all_gather_1 = all_gather([primals_6, primals_5], primals_13, 8, '0', float32, False)
region_end_default_6 = region_end(primals_13)
region_begin_default = region_begin(primals_11, 'backward_compute')
t_4: float32[10, 4] = aten.t(tangents_1)
mm_4: float32[10, 8] = aten.mm(t_4, getitem_9)
t_5: float32[8, 10] = aten.t(mm_4)
mm_5: float32[4, 8] = aten.mm(tangents_1, t_6)
t_7: float32[10, 8] = aten.t(t_5)
native_layer_norm_backward = aten.native_layer_norm_backward(mm_5, add_2, [8], getitem_10, getitem_11, unshard_7,
        None, [True, True, False])
getitem_12: float32[4, 8] = getitem(native_layer_norm_backward, 0)
getitem_13: float32[8] = getitem(native_layer_norm_backward, 1)
gelu_backward: float32[4, 8] = aten.gelu_backward(getitem_12, mm_2)
t_8: float32[8, 4] = aten.t(gelu_backward)
region_end_default = region_end(primals_11)
constant_pad_nd_default: float32[16, 8] = aten.constant_pad_nd(t_7, [0, 0, 0, 6])
region_begin_default_7 = region_begin(primals_11, 'reduce_scatter')
reduce_scatter_0 = reduce_scatter([constant_pad_nd_default, getitem_13], 'sum', 8, '0')
region_end_default_7 = region_end(primals_11)
region_begin_default_1 = region_begin(primals_14, 'backward_compute')
mm_6: float32[8, 8] = aten.mm(t_8, getitem_6)
t_9: float32[8, 8] = aten.t(mm_6)
getitem_23: float32[8, 8] = getitem(all_gather_0, 0)
getitem_24: float32[8] = getitem(all_gather_0, 1)
wait_tensor_default: float32[8, 8] = wait_tensor(getitem_23)
wait_tensor_default_1: float32[8] = wait_tensor(getitem_24)
t_2: float32[8, 8] = aten.t(wait_tensor_default)
t_10: float32[8, 8] = aten.t(t_2)
mm_7: float32[4, 8] = aten.mm(gelu_backward, t_10)
t_11: float32[8, 8] = aten.t(t_9)
native_layer_norm_backward_1 = aten.native_layer_norm_backward(mm_7, add_1, [8], getitem_7, getitem_8,
        wait_tensor_default_1, None, [True, True, False])
getitem_15: float32[4, 8] = getitem(native_layer_norm_backward_1, 0)
getitem_16: float32[8] = getitem(native_layer_norm_backward_1, 1)
add_3: float32[4, 8] = aten.add.Tensor(getitem_12, getitem_15)
gelu_backward_1: float32[4, 8] = aten.gelu_backward(add_3, mm_1)
t_12: float32[8, 4] = aten.t(gelu_backward_1)
region_end_default_1 = region_end(primals_14)
region_begin_default_8 = region_begin(primals_12, 'all_gather')
all_gather_2 = all_gather([primals_4, primals_3], primals_12, 8, '0', float32, False)
region_end_default_8 = region_end(primals_12)
region_begin_default_9 = region_begin(primals_14, 'reduce_scatter')
reduce_scatter_1 = reduce_scatter([t_11, getitem_16], 'sum', 8, '0')
region_end_default_9 = region_end(primals_14)
getitem_29: float32[2, 8] = getitem(reduce_scatter_0, 0)
getitem_30: float32[1] = getitem(reduce_scatter_0, 1)
wait_tensor_default_6: float32[2, 8] = wait_tensor(getitem_29)
wait_tensor_default_7: float32[1] = wait_tensor(getitem_30)
mul_tensor: float32[2, 8] = aten.mul.Tensor(wait_tensor_default_6, 0.125)
mul_tensor_1: float32[1] = aten.mul.Tensor(wait_tensor_default_7, 0.125)
region_begin_default_2 = region_begin(primals_13, 'backward_compute')
mm_8: float32[8, 8] = aten.mm(t_12, getitem_3)
t_13: float32[8, 8] = aten.t(mm_8)
getitem_25: float32[8, 8] = getitem(all_gather_1, 0)
getitem_26: float32[8] = getitem(all_gather_1, 1)
wait_tensor_default_2: float32[8, 8] = wait_tensor(getitem_25)
wait_tensor_default_3: float32[8] = wait_tensor(getitem_26)
t_1: float32[8, 8] = aten.t(wait_tensor_default_2)
t_14: float32[8, 8] = aten.t(t_1)
mm_9: float32[4, 8] = aten.mm(gelu_backward_1, t_14)
t_15: float32[8, 8] = aten.t(t_13)
gelu: float32[4, 8] = aten.gelu(mm)
add: float32[4, 8] = aten.add.Tensor(embedding, gelu)
native_layer_norm_backward_2 = aten.native_layer_norm_backward(mm_9, add, [8], getitem_4, getitem_5,
        wait_tensor_default_3, None, [True, True, False])
getitem_18: float32[4, 8] = getitem(native_layer_norm_backward_2, 0)
getitem_19: float32[8] = getitem(native_layer_norm_backward_2, 1)
add_4: float32[4, 8] = aten.add.Tensor(add_3, getitem_18)
gelu_backward_2: float32[4, 8] = aten.gelu_backward(add_4, mm)
t_16: float32[8, 4] = aten.t(gelu_backward_2)
region_end_default_2 = region_end(primals_13)
region_begin_default_10 = region_begin(primals_13, 'reduce_scatter')
reduce_scatter_2 = reduce_scatter([t_15, getitem_19], 'sum', 8, '0')
region_end_default_10 = region_end(primals_13)
getitem_31: float32[1, 8] = getitem(reduce_scatter_1, 0)
getitem_32: float32[1] = getitem(reduce_scatter_1, 1)
wait_tensor_default_8: float32[1, 8] = wait_tensor(getitem_31)
wait_tensor_default_9: float32[1] = wait_tensor(getitem_32)
mul_tensor_2: float32[1, 8] = aten.mul.Tensor(wait_tensor_default_8, 0.125)
mul_tensor_3: float32[1] = aten.mul.Tensor(wait_tensor_default_9, 0.125)
region_begin_default_3 = region_begin(primals_12, 'backward_compute')
mm_10: float32[8, 8] = aten.mm(t_16, getitem)
t_17: float32[8, 8] = aten.t(mm_10)
start_next_graph_default = start_next_graph(primals_14)
getitem_27: float32[8, 8] = getitem(all_gather_2, 0)
getitem_28: float32[8] = getitem(all_gather_2, 1)
wait_tensor_default_4: float32[8, 8] = wait_tensor(getitem_27)
wait_tensor_default_5: float32[8] = wait_tensor(getitem_28)
t: float32[8, 8] = aten.t(wait_tensor_default_4)
t_18: float32[8, 8] = aten.t(t)
mm_11: float32[4, 8] = aten.mm(gelu_backward_2, t_18)
t_19: float32[8, 8] = aten.t(t_17)
native_layer_norm_backward_3 = aten.native_layer_norm_backward(mm_11, embedding, [8], getitem_1, getitem_2,
        wait_tensor_default_5, None, [True, True, False])
getitem_21: float32[4, 8] = getitem(native_layer_norm_backward_3, 0)
getitem_22: float32[8] = getitem(native_layer_norm_backward_3, 1)
region_begin_default_11 = region_begin(primals_12, 'reduce_scatter')
reduce_scatter_3 = reduce_scatter([t_19, getitem_22], 'sum', 8, '0')
region_end_default_11 = region_end(primals_12)
getitem_33: float32[1, 8] = getitem(reduce_scatter_2, 0)
getitem_34: float32[1] = getitem(reduce_scatter_2, 1)
wait_tensor_default_10: float32[1, 8] = wait_tensor(getitem_33)
wait_tensor_default_11: float32[1] = wait_tensor(getitem_34)
mul_tensor_4: float32[1, 8] = aten.mul.Tensor(wait_tensor_default_10, 0.125)
mul_tensor_5: float32[1] = aten.mul.Tensor(wait_tensor_default_11, 0.125)
add_5: float32[4, 8] = aten.add.Tensor(add_4, getitem_21)
region_end_default_3 = region_end(primals_12)
region_begin_default_4 = region_begin(primals_11, 'backward_compute')
embedding_dense_backward: float32[10, 8] = aten.embedding_dense_backward(add_5, primals_2, 10, -1, False)
region_end_default_4 = region_end(primals_11)
constant_pad_nd_default_1: float32[16, 8] = aten.constant_pad_nd(embedding_dense_backward, [0, 0, 0, 6])
region_begin_default_12 = region_begin(primals_11, 'reduce_scatter')
reduce_scatter_4 = reduce_scatter([constant_pad_nd_default_1], 'sum', 8, '0')
region_end_default_12 = region_end(primals_11)
getitem_35: float32[1, 8] = getitem(reduce_scatter_3, 0)
getitem_36: float32[1] = getitem(reduce_scatter_3, 1)
wait_tensor_default_12: float32[1, 8] = wait_tensor(getitem_35)
wait_tensor_default_13: float32[1] = wait_tensor(getitem_36)
mul_tensor_6: float32[1, 8] = aten.mul.Tensor(wait_tensor_default_12, 0.125)
mul_tensor_7: float32[1] = aten.mul.Tensor(wait_tensor_default_13, 0.125)
getitem_37: float32[2, 8] = getitem(reduce_scatter_4, 0)
wait_tensor_default_14: float32[2, 8] = wait_tensor(getitem_37)
mul_tensor_8: float32[2, 8] = aten.mul.Tensor(wait_tensor_default_14, 0.125)
return [mul_tensor_8, None, mul_tensor_7, mul_tensor_6, mul_tensor_5, mul_tensor_4, mul_tensor_3, mul_tensor_2,
        mul_tensor_1, mul_tensor, None, None, None, None]""",
    )
