"""bucket_all_reduces: one all-reduce for the gradients that one reduce-scatter makes, scheduled one reduction later."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh

from fsdp_passes import fully_shard
from fsdp_passes.passes.await_collectives import await_collectives
from fsdp_passes.passes.bucket_all_reduces import bucket_all_reduces
from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.pipeline import CompilationRecord, graph_text
from fsdp_passes.schedule import ALL_REDUCE, REDUCE_SCATTER, bucket_of
from fsdp_passes.watchdog import AWAIT_COLLECTIVE
from tests.graphs import TinyTransformer, assert_keeps_values, compile_step, reduce_grad, short, steps, trace


def reduce_replicas(
    grad: Tensor, unit: int, *, num_replicas: int = 2, dtype: torch.dtype = torch.float32, factor: float | None = None
) -> Tensor:
    """`fsdp_passes::reduce_replicas` on the default group; the result is float32."""
    return torch.ops.fsdp_passes.reduce_replicas(grad, None, unit, num_replicas, "0", dtype, torch.float32, factor)


def two_gradients(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first = reduce_replicas(reduce_grad(x.t() @ y, 0, world_size=4), 0)
    return first, reduce_replicas(reduce_grad(y.t() @ y, 0, world_size=4), 0)


def two_gradients_graph() -> fx.Graph:
    return trace(two_gradients, torch.ones(4, 8), torch.ones(4, 8)).graph


def lowered(graph: fx.Graph, mode: str = "coalesced") -> fx.Graph:
    bucket_all_reduces(graph, bucket_mode=mode)
    graph.lint()
    bucket_reduce_scatters(graph, bucket_mode=mode)
    graph.lint()
    return graph


@pytest.mark.usefixtures("eight_fake_ranks")
def test_its_wait_takes_no_inputs_since_its_results_are_what_it_sends() -> None:
    graph = lowered(two_gradients_graph())
    await_collectives(graph, labels={})
    waits = graph.find_nodes(op="call_function", target=AWAIT_COLLECTIVE)
    assert [(wait.args[3], len(wait.args[0]), len(wait.args[1])) for wait in waits] == [
        *[("reduce_scatter", 2, 2), ("all_reduce", 2, 0)]
    ]


def replicas_record(**options: object) -> CompilationRecord:
    model = fully_shard(TinyTransformer(), mesh=init_device_mesh("cpu", (2, 4)), units=["layers.*"])
    return compile_step(model, torch.arange(4), **options)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden() -> None:
    assert_expected_inline(
        short(graph_text(lowered(two_gradients_graph()))),
        """\
x_1: float32[4, 8] = input
y_1: float32[4, 8] = input
t: float32[8, 4] = aten.t(x_1)
mm: float32[8, 8] = aten.mm(t, y_1)
t_1: float32[8, 4] = aten.t(y_1)
mm_1: float32[8, 8] = aten.mm(t_1, y_1)
reduce_scatter_0 = reduce_scatter([mm, mm_1], 'sum', 4, '0')
getitem_2: float32[2, 8] = getitem(reduce_scatter_0, 0)
getitem_3: float32[2, 8] = getitem(reduce_scatter_0, 1)
wait_tensor_default_2: float32[2, 8] = wait_tensor(getitem_2)
wait_tensor_default_3: float32[2, 8] = wait_tensor(getitem_3)
mul_tensor_2: float32[2, 8] = aten.mul.Tensor(wait_tensor_default_2, 0.25)
mul_tensor_3: float32[2, 8] = aten.mul.Tensor(wait_tensor_default_3, 0.25)
all_reduce_0 = all_reduce_coalesced([mul_tensor_2, mul_tensor_3], 'sum', '0')
getitem: float32[2, 8] = getitem(all_reduce_0, 0)
getitem_1: float32[2, 8] = getitem(all_reduce_0, 1)
wait_tensor_default: float32[2, 8] = wait_tensor(getitem)
wait_tensor_default_1: float32[2, 8] = wait_tensor(getitem_1)
mul_tensor: float32[2, 8] = aten.mul.Tensor(wait_tensor_default, 0.5)
mul_tensor_1: float32[2, 8] = aten.mul.Tensor(wait_tensor_default_1, 0.5)
return [mul_tensor, mul_tensor_1]""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_packed() -> None:
    graph = two_gradients_graph()
    bucket_all_reduces(graph, bucket_mode="packed")
    assert_expected_inline(
        short(graph_text(graph)),
        """\
x_1: float32[4, 8] = input
y_1: float32[4, 8] = input
t: float32[8, 4] = aten.t(x_1)
mm: float32[8, 8] = aten.mm(t, y_1)
reduce_grad: float32[2, 8] = reduce_grad(mm, None, 0, 4, '0', float32, float32)
t_1: float32[8, 4] = aten.t(y_1)
mm_1: float32[8, 8] = aten.mm(t_1, y_1)
reduce_grad_1: float32[2, 8] = reduce_grad(mm_1, None, 0, 4, '0', float32, float32)
view_default: float32[16] = aten.view(reduce_grad, [-1])
view_default_1: float32[16] = aten.view(reduce_grad_1, [-1])
cat_default: float32[32] = aten.cat([view_default, view_default_1])
all_reduce_0: float32[32] = all_reduce(cat_default, 'sum', '0')
wait_tensor_default: float32[32] = wait_tensor(all_reduce_0)
slice_tensor: float32[16] = aten.slice.Tensor(wait_tensor_default, 0, 0, 16)
view_default_2: float32[2, 8] = aten.view(slice_tensor, [2, 8])
mul_tensor: float32[2, 8] = aten.mul.Tensor(view_default_2, 0.5)
slice_tensor_1: float32[16] = aten.slice.Tensor(wait_tensor_default, 0, 16, 32)
view_default_3: float32[2, 8] = aten.view(slice_tensor_1, [2, 8])
mul_tensor_1: float32[2, 8] = aten.mul.Tensor(view_default_3, 0.5)
return [mul_tensor, mul_tensor_1]""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_each_starts_where_its_reduce_scatter_is_awaited_and_waits_one_reduction_longer() -> None:
    backward = replicas_record(nvtx=False).graphs[1]
    assert_expected_inline(
        steps(backward.passes["schedule_one_layer_ahead"]),
        """\
all_gather_0.start all_gather_1.start mm_4 mm_5 native_layer_norm_backward gelu_backward
reduce_scatter_0.start mm_6 all_gather_0.wait mm_7 native_layer_norm_backward_1 add_3 gelu_backward_1
all_gather_2.start reduce_scatter_1.start reduce_scatter_0.wait all_reduce_0.start mm_8 all_gather_1.wait mm_9
gelu add native_layer_norm_backward_2 add_4 gelu_backward_2 reduce_scatter_2.start reduce_scatter_1.wait
all_reduce_1.start all_reduce_0.wait mm_10 all_gather_2.wait mm_11 native_layer_norm_backward_3
reduce_scatter_3.start reduce_scatter_2.wait all_reduce_2.start all_reduce_1.wait add_5
embedding_dense_backward reduce_scatter_4.start reduce_scatter_3.wait all_reduce_3.start all_reduce_2.wait
reduce_scatter_4.wait all_reduce_4.start all_reduce_3.wait all_reduce_4.wait""",
    )
    assert backward.report is not None
    assert backward.report.losses == backward.report.problems == ()


@pytest.mark.usefixtures("eight_fake_ranks")
def test_every_reduce_scatter_has_one_all_reduce_of_its_rows() -> None:
    starts = [event for event in replicas_record().graphs[1].events if event.kind == "start"]
    reductions = {event.bucket: event.bucket for event in starts if event.bucket.kind == REDUCE_SCATTER}
    all_reduces = [event for event in starts if event.bucket.kind == ALL_REDUCE]
    assert len(all_reduces) == len(reductions)
    for event in all_reduces:
        (source,) = event.reads
        bucket = event.bucket
        assert (bucket.unit, bucket.run, bucket.half) == (source.unit, source.run, source.half)
        assert bucket.num_bytes * 4 == source.num_bytes
        assert bucket.num_ranks == 2
        assert bucket.shapes == source.shapes


@pytest.mark.usefixtures("eight_fake_ranks")
def test_does_nothing_without_replicas_and_when_called_again() -> None:
    graph = trace(lambda x: reduce_grad(x, 0), torch.ones(8, 8)).graph
    before = graph_text(graph)
    assert bucket_all_reduces(graph, bucket_mode="coalesced") == []
    assert graph_text(graph) == before
    graph = two_gradients_graph()
    bucket_all_reduces(graph, bucket_mode="coalesced")
    before = graph_text(graph)
    assert bucket_all_reduces(graph, bucket_mode="coalesced") == []
    assert graph_text(graph) == before


@pytest.mark.usefixtures("eight_fake_ranks")
def test_units_and_dtypes_have_their_own() -> None:
    def gradients(x: Tensor) -> list[Tensor]:
        low = torch.bfloat16
        return [
            reduce_replicas(reduce_grad(x, 0), 0),
            reduce_replicas(reduce_grad(x, 0, dtype=low, out=low), 0, dtype=low),
            reduce_replicas(reduce_grad(x, 1), 1),
        ]

    buckets = bucket_all_reduces(trace(gradients, torch.ones(8, 8)).graph, bucket_mode="coalesced")
    assert [(b.index, b.unit, b.dtype) for b in buckets] == [
        (0, 0, torch.float32),
        (1, 0, torch.bfloat16),
        (2, 1, torch.float32),
    ]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", ["coalesced", "packed"])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, None), (torch.float16, None), (torch.float32, 8.0)])
def test_values_stay(mode: str, dtype: torch.dtype, factor: float | None) -> None:
    """On one rank a sum is the value itself, which the divisions then scale."""

    def gradients(x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            reduce_replicas(
                reduce_grad(value, 0, world_size=1, dtype=dtype, out=dtype),
                0,
                num_replicas=1,
                dtype=dtype,
                factor=factor,
            )
            for value in (x, y)
        ]

    inputs = [torch.randn(4, 8), torch.randn(3, 5)]
    gm = trace(gradients, *inputs)
    assert_keeps_values(gm, inputs, lambda graph: lowered(graph, mode))
    assert any(bucket_of(node) is not None for node in gm.graph.nodes)
