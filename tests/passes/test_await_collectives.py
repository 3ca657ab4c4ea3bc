"""await_collectives: one wait for all results of a collective."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.generated_code import read_generated_code
from fsdp_passes.passes.await_collectives import await_collectives
from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.pipeline import graph_text
from fsdp_passes.watchdog import AWAIT_COLLECTIVE
from tests.graphs import TinyTransformer, assert_keeps_values, label_named, reduce_grad, short, trace, unshard
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import one_rank as one_rank


@pytest.fixture
def two_units() -> fx.Graph:
    shards = torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4)

    def function(x: Any, s0: Any, s1: Any, s2: Any, l0: Any, l1: Any) -> object:
        y = x @ unshard(s0, 0, label=l0).t() @ unshard(s1, 0, label=l0)
        return y @ unshard(s2, 1, label=l1).t()

    graph = trace(function, torch.ones(3, 4), *shards, label_named("a"), label_named("b")).graph
    bucket_all_gathers(graph, bucket_mode="coalesced")
    return graph


def place_of_labels(graph: fx.Graph) -> dict[int, fx.Node]:
    return dict(enumerate([node for node in graph.nodes if node.op == "placeholder"][-2:]))


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden(two_units: fx.Graph) -> None:
    assert await_collectives(two_units, labels={0: place_of_labels(two_units)[0]}) == 2
    two_units.lint()
    lines = [line for line in graph_text(two_units).splitlines() if "input" not in line]
    assert_expected_inline(
        short("\n".join(lines)),
        """\
all_gather_0 = all_gather([s0_1, s1_1], l0_1, 8, '0', float32, False)
getitem: float32[16, 4] = getitem(all_gather_0, 0)
getitem_1: float32[16, 4] = getitem(all_gather_0, 1)
await_collective_default = await_collective([getitem, getitem_1], [], l0_1, 'all_gather', '0')
t: float32[4, 16] = aten.t(getitem)
mm: float32[3, 16] = aten.mm(x_1, t)
mm_1: float32[3, 4] = aten.mm(mm, getitem_1)
all_gather_1 = all_gather([s2_1], l1_1, 8, '0', float32, False)
getitem_2: float32[16, 4] = getitem(all_gather_1, 0)
await_collective_default_1 = await_collective([getitem_2], [], None, 'all_gather', '0')
t_1: float32[4, 16] = aten.t(getitem_2)
mm_2: float32[3, 16] = aten.mm(mm_1, t_1)
return mm_2""",
    )


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_wait_for_reduced_gradients_takes_what_is_sent_so_that_its_memory_stays(bucket_mode: str) -> None:
    def function(g0: Tensor, g1: Tensor) -> tuple[Tensor, Tensor]:
        return reduce_grad(g0 * 2, 0), reduce_grad(g1 * 3, 0)

    graph = trace(function, torch.ones(8, 4), torch.ones(8)).graph
    bucket_reduce_scatters(graph, bucket_mode=bucket_mode)
    await_collectives(graph, labels={})
    (start,) = [node for node in graph.nodes if "reduce_scatter" in node.name]
    (wait,) = [node for node in graph.nodes if node.target is AWAIT_COLLECTIVE]
    results, sent, label, kind, group_name = wait.args
    assert sent == (start.args[0] if bucket_mode == "coalesced" else [start.args[0]])
    assert results == ([start] if bucket_mode == "packed" else list(start.users))
    assert (label, kind, group_name) == (None, "reduce_scatter", "0")


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_backwards_gather_of_what_the_forward_kept_holds_its_memory_and_one_of_shards_does_not() -> None:
    """Inductor may use the memory of what was saved for a backward alone again; that of parameters is the caller's."""

    def function(primals_1: Any, kept: Any, tangents_1: Any) -> object:
        return tangents_1 @ unshard(primals_1, 0).t() @ unshard(kept, 1)

    graph = trace(function, torch.ones(2, 4), torch.ones(2, 4), torch.ones(3, 4)).graph
    bucket_all_gathers(graph, bucket_mode="coalesced")
    await_collectives(graph, labels={})
    sent = [node.args[1] for node in graph.nodes if node.target is AWAIT_COLLECTIVE]
    assert [[node.target for node in nodes] for nodes in sent] == [[], ["kept_1"]]


@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_pass_is_idempotent(two_units: fx.Graph) -> None:
    assert await_collectives(two_units, labels=place_of_labels(two_units)) == 2
    before = graph_text(two_units)
    assert await_collectives(two_units, labels=place_of_labels(two_units)) == 0
    assert graph_text(two_units) == before


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
def test_values_stay(bucket_mode: str) -> None:
    def function(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return x @ unshard(a, 0, world_size=1) + unshard(b, 0, world_size=1)

    arguments = [torch.randn(4, 4), torch.randn(4), torch.randn(4, 4)]

    def transform(graph: fx.Graph) -> None:
        bucket_all_gathers(graph, bucket_mode=bucket_mode)
        await_collectives(graph, labels={})

    assert_keeps_values(trace(function, *arguments), arguments, transform)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
def test_no_collective_of_a_step_stays_in_pytorchs_registry(inner: str, bucket_mode: str) -> None:
    model = fully_shard(copy.deepcopy(TinyTransformer(dim=16)), units=["layers.*"])
    compiled = torch.compile(model, backend=overlap_fsdp, options={"inner": inner, "bucket_mode": bucket_mode})
    before = torch._C._distributed_c10d._get_work_registry_size()
    compiled(torch.arange(4)).sum().backward()
    assert torch._C._distributed_c10d._get_work_registry_size() == before


@pytest.mark.usefixtures("one_rank")
def test_a_convolutions_weight_that_is_kept_changes_its_layout_behind_the_wait() -> None:
    """Inductor copies it where it is made, and that was the start: the generated code is refused then."""
    reference = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 6, 3))
    model = fully_shard(copy.deepcopy(reference), units=["0", "2"], reshard_after_forward=False)
    images = torch.randn(2, 3, 8, 8)
    found = torch.compile(model, backend=overlap_fsdp)(images)
    expected = reference(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    found.square().mean().backward()
    expected.square().mean().backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad, rtol=0, atol=1e-5)


def test_generated_code_waits_once_and_a_kernel_ahead_of_it_reads_too_early() -> None:
    code = """
def call(args):
    buf0 = torch.ops.fsdp_passes.all_gather.default([arg0, arg1], arg2, 2, '0', torch.float32, False)
    buf1 = buf0[0]
    buf2 = buf0[1]
    torch.ops.fsdp_passes.await_collective.default([buf1, buf2], [arg0, arg1], arg2, 'all_gather', '0')
    extern_kernels.mm(buf2, arg3, out=buf4)
"""
    steps = read_generated_code(code)
    assert [(step.kind, step.name) for step in steps] == [
        *[("start", "all_gather"), ("wait", "await_collective"), ("kernel", "extern_kernels.mm")]
    ]
    assert [step.start for step in steps] == [("buf0",)] * 3
