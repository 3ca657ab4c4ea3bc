"""Meshes of two dimensions: sharded over one, replicated along the other, against FSDP2 and the unsharded model."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_passes import fully_shard
from fsdp_passes.errors import ScheduleWarning
from fsdp_passes.pipeline import record_compilations
from tests.distributed.checks import call_of, collectives, compiled, float_batches, recorded_regions
from tests.distributed.test_scalars import Model as ModelWithScalars
from tests.graphs import Layer
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train, whole

HERE = "tests.distributed.test_replicas"
SHAPES = [(2, 2), (2, 1), (1, 2)]


@pytest.fixture
def pool_of(two_ranks: RankPool, four_ranks: RankPool) -> Any:
    return lambda shape: four_ranks if shape == (2, 2) else two_ranks


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def shard_with_fsdp2(model: Transformer, mesh: DeviceMesh, **how: Any) -> nn.Module:
    for layer in model.layers:
        fsdp2.fully_shard(layer, mesh=mesh, **how)
    return fsdp2.fully_shard(model, mesh=mesh, **how)


def trains(shape: tuple[int, int], way: str) -> None:
    """61 rows are divided by no number of ranks."""
    mesh = mesh_of(shape)
    model, reference = build(lambda: Transformer(layers=2, hidden=61))
    twin = shard_with_fsdp2(copy.deepcopy(reference), mesh)
    fully_shard(model, mesh=mesh, units=["layers.*"])
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert param.placements == other.placements, name
        assert param.device_mesh == other.device_mesh
        assert torch.equal(param.to_local(), other.to_local()), name
    batches = token_batches(3, 4, 8)
    with record_compilations() as records, warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        found = train(model, batches, sharded=True, call=call_of(model, way))
    assert len(records) == (way != "fallback")
    assert_same(found, train(reference, batches, sharded=False))
    assert_same(found, train(twin, batches, sharded=True))


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
@pytest.mark.parametrize("shape", SHAPES)
def test_replicas_train_as_the_unsharded_model_and_fsdp2(pool_of: Any, shape: tuple[int, int], way: str) -> None:
    pool_of(shape).run(f"{HERE}:trains", shape=shape, way=way)


@pytest.mark.parametrize("way", ["inductor", "eager"])
def test_replicas_train_as_scheduled_and_under_the_checked_interpreter(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:trains", shape=(2, 2), way=way)


# ---- what is sent ----------------------------------------------------------------------------------------------------


def order_of_collectives(way: str) -> list[str]:
    """The starts of the third step, as the profiler saw them. (The input needs a gradient, as in
    `test_both_ways_agree`.)"""
    model = fully_shard(nn.Sequential(Layer(8), Layer(8), Layer(8)), mesh=mesh_of((2, 2)), units=["*"])
    call = call_of(model, way)
    x = torch.randn(8, 8, requires_grad=True)
    for _ in range(2):
        call(x).square().mean().backward()
    with recorded_regions() as regions:
        call(x).square().mean().backward()
    names = [name.removeprefix("FSDP:") for name in regions if not name.endswith("_compute")]
    return [name for name, _ in itertools.groupby(names)]


def test_all_reduces_start_behind_the_next_units_reduce_scatter_both_ways(four_ranks: RankPool) -> None:
    ways = ("aot_eager", "fallback")
    compiled, fallback = (four_ranks.run(f"{HERE}:order_of_collectives", way=way)[0] for way in ways)
    assert compiled == fallback
    assert_expected_inline(
        "\n".join(fallback),
        """\
0:all_gather
1:all_gather
2:all_gather
1:all_gather
0:all_gather
2:reduce_scatter
1:reduce_scatter
2:all_reduce
0:reduce_scatter
1:all_reduce
0:all_reduce""",
    )


def same_bits(policy: bool) -> None:
    results = []
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if policy else {}
    for way in ("aot_eager", "fallback"):
        model, _ = build(lambda: Transformer(hidden=125))
        fully_shard(model, mesh=mesh_of((2, 2)), units=["layers.*"], **how)
        results.append(train(model, token_batches(3, 4, 16), sharded=True, call=call_of(model, way)))
    assert results[0].losses == results[1].losses
    for name, value in results[0].grads.items():
        assert torch.equal(value, results[1].grads[name]), name


@pytest.mark.parametrize("policy", [False, True])
def test_both_ways_are_equal_bit_by_bit(four_ranks: RankPool, policy: bool) -> None:
    four_ranks.run(f"{HERE}:same_bits", policy=policy)


def packed() -> None:
    model, reference = build(lambda: Transformer(layers=2, hidden=61))
    fully_shard(model, mesh=mesh_of((2, 2)), units=["layers.*"])
    call = compiled(model, bucket_mode="packed")
    batches = token_batches(2, 4, 8)
    assert_same(train(model, batches, sharded=True, call=call), train(reference, batches, sharded=False))


def test_packed_buckets_train_replicas(four_ranks: RankPool) -> None:
    four_ranks.run(f"{HERE}:packed")


def in_lower_precision(way: str, dtype: torch.dtype) -> None:
    """Reduced in two steps in `dtype`, against FSDP2."""
    mesh, policy = mesh_of((2, 2)), MixedPrecisionPolicy(param_dtype=dtype)
    model, reference = build(lambda: Transformer(layers=2))
    twin = shard_with_fsdp2(reference, mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, units=["layers.*"], mp_policy=policy)
    (batch,) = token_batches(1, 4, 8)
    call_of(model, way)(*my_share(batch)).backward()
    twin(*my_share(batch)).backward()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert param.grad.dtype == torch.float32
        torch.testing.assert_close(whole(param.grad), whole(other.grad), rtol=0.05, atol=2e-3, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_replicas_in_lower_precision_equal_fsdp2(four_ranks: RankPool, way: str, dtype: torch.dtype) -> None:
    four_ranks.run(f"{HERE}:in_lower_precision", way=way, dtype=dtype)


# ---- accumulation ----------------------------------------------------------------------------------------------------


def accumulates_without_all_reduce(way: str) -> int:
    """Two rounds of three micro-batches, of which the last all-reduces. Returns the number of compilations."""
    mesh = mesh_of((2, 2))
    model, reference = build(lambda: Transformer(layers=2, hidden=61))
    twin = shard_with_fsdp2(copy.deepcopy(reference), mesh)
    fully_shard(model, mesh=mesh, units=["layers.*"])
    call = call_of(model, way)
    with record_compilations() as records:
        for index, batch in enumerate(token_batches(7, 4, 8)):
            is_last = index % 3 == 2 or index == 6
            for sharded in (model, twin):
                sharded.set_requires_all_reduce(is_last)
            with recorded_regions() as regions:
                call(*my_share(batch)).backward()
            twin(*my_share(batch)).backward()
            reference(*batch).backward()
            kinds = [name.split(":")[-1] for name in regions]
            # Two collectives of the root: its embedding and its head lie at the two ends of the graph.
            assert kinds.count("reduce_scatter") >= 3, "gradients are sharded at once"
            assert (kinds.count("all_reduce") >= 3) == is_last, kinds
            if not is_last:
                assert all(param.grad is None for param in (*model.parameters(), *twin.parameters()))
                continue
            triples = zip(model.named_parameters(), twin.parameters(), reference.parameters(), strict=True)
            for (name, param), other, expected in triples:
                torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-5, msg=name)
                torch.testing.assert_close(whole(param.grad), whole(other.grad), rtol=0, atol=1e-5, msg=name)
            for module in (model, twin, reference):
                module.zero_grad()
    for record in records[:1]:
        assert not any(name.startswith("all_reduce") for name in collectives(record, "backward"))
    return len(records)


@pytest.mark.parametrize("way", ["aot_eager", "inductor", "fallback"])
def test_micro_batches_wait_for_one_all_reduce_and_equal_fsdp2(four_ranks: RankPool, way: str) -> None:
    # The graph without all-reduce runs the last micro-batch too; the one with it the step that is no accumulation.
    assert four_ranks.run(f"{HERE}:accumulates_without_all_reduce", way=way)[0] == (0 if way == "fallback" else 2)


def without_any_sync(way: str) -> None:
    """`no_sync` keeps whole gradients, whatever the mesh; then a reduce-scatter and an all-reduce of their sum."""
    model, reference = build(lambda: Transformer(layers=2))
    fully_shard(model, mesh=mesh_of((2, 2)), units=["layers.*"])
    call = call_of(model, way)
    first, second = token_batches(2, 4, 8)
    with model.no_sync(), recorded_regions() as regions:
        call(*my_share(first)).backward()
    assert not any("reduce" in name for name in regions)
    call(*my_share(second)).backward()
    for batch in (first, second):
        reference(*batch).backward()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_without_gradient_sync_replicas_reduce_at_the_end(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:without_any_sync", way=way)


def divided_by_a_factor(way: str) -> None:
    model, reference = build(lambda: Transformer(layers=2))
    fully_shard(model, mesh=mesh_of((2, 2)))
    model.set_gradient_divide_factor(2.0)
    (batch,) = token_batches(1, 4, 8)
    call_of(model, way)(*my_share(batch)).backward()
    reference(*batch).backward()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), 2 * expected.grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_a_divide_factor_counts_once_for_shards_and_replicas(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:divided_by_a_factor", way=way)


# ---- replicas are equal ----------------------------------------------------------------------------------------------


def _across_replicas(tensor: torch.Tensor, mesh: DeviceMesh) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(mesh.size(0))]
    dist.all_gather(found, tensor.contiguous(), group=mesh.get_group(0))
    return found


def with_seeds_of_their_own(shape: tuple[int, int]) -> None:
    """Every rank draws other numbers; the replicas hold those of the first, and go on being equal."""
    mesh = mesh_of(shape)
    torch.manual_seed(dist.get_rank())
    model = ModelWithScalars()
    before = model.layers[0].linear.weight.detach().clone()
    fully_shard(model, mesh=mesh, units=["layers.*"])
    if dist.get_rank() == 0:
        rows = -(-5 // mesh.size(1))
        assert torch.equal(model.layers[0].linear.weight.to_local(), before[:rows]), "the first replica keeps its own"
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for (x,) in float_batches(2, 4, 8):
        for name, param in model.named_parameters():
            first, *others = _across_replicas(param.to_local().detach(), mesh)
            assert all(torch.equal(first, other) for other in others), name
        model(*my_share((x,))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_replicas_start_and_stay_equal_with_a_seed_for_each_rank(pool_of: Any, shape: tuple[int, int]) -> None:
    pool_of(shape).run(f"{HERE}:with_seeds_of_their_own", shape=shape)


def initialized_on_shards() -> None:
    """From the meta device, with random numbers of each rank's own: `sync_replicas` makes the replicas equal."""
    mesh = mesh_of((2, 2))
    with torch.device("meta"):
        model = ModelWithScalars()
    fully_shard(model, mesh=mesh, units=["layers.*"]).to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    for param in model.parameters():
        param.to_local().data.normal_()
    model.sync_replicas()
    for name, param in model.named_parameters():
        first, other = _across_replicas(param.to_local().detach(), mesh)
        assert torch.equal(first, other), name
        assert first.any()


def test_replicas_that_were_initialized_as_shards_are_made_equal(four_ranks: RankPool) -> None:
    four_ranks.run(f"{HERE}:initialized_on_shards")


def scalars(way: str) -> None:
    """Averaged over both dimensions; without all-reduce over replicas they wait."""
    model, reference = build(ModelWithScalars)
    fully_shard(model, mesh=mesh_of((2, 2)), units=["layers.*"])
    assert [str(p) for p in model.logit_scale.placements] == ["R", "R"]
    call = call_of(model, way)
    for is_last, batch in zip((False, True, True), float_batches(3, 4, 8), strict=True):
        model.set_requires_all_reduce(is_last)
        call(*my_share(batch)).backward()
        reference(*batch).backward()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_scalars_are_averaged_over_shards_and_replicas(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:scalars", way=way)
