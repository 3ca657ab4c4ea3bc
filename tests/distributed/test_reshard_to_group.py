"""`reshard_after_forward` as a number: the backward gathers over fewer ranks what these kept from the forward."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_passes import fully_shard
from fsdp_passes.errors import OptionValueError, ScheduleWarning, StaleParametersError
from fsdp_passes.pipeline import record_compilations
from fsdp_passes.unit import unit_of
from tests.distributed.checks import call_of, compiled, recorded_regions
from tests.graphs import Layer
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train

HERE = "tests.distributed.test_reshard_to_group"
WAYS = ["aot_eager", "inductor", "fallback"]


def trains(way: str, policy: bool) -> None:
    """61 and 3 rows: the four ranks pad otherwise than the two."""
    model, reference = build(lambda: Transformer(layers=2, hidden=61))
    twin = copy.deepcopy(reference)
    how = {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if policy else {}
    for layer in twin.layers:
        fsdp2.fully_shard(layer, reshard_after_forward=2, **how)
    fsdp2.fully_shard(twin, reshard_after_forward=2, **how)
    fully_shard(model, units=["layers.*"], reshard_after_forward=2, **how)
    batches = token_batches(3, 4, 8)
    with record_compilations() as records, warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        found = train(model, batches, sharded=True, call=call_of(model, way))
    if not policy:
        assert_same(found, train(reference, batches, sharded=False))
    assert_same(found, train(twin, batches, sharded=True), atol=2e-2 if policy else 1e-5, check_params=not policy)
    for record in records:
        forward, backward = (
            {
                event.bucket.num_ranks
                for event in graph.events
                if event.kind == "start" and "gather" in event.bucket.kind
            }
            for graph in record.graphs
        )
        assert (forward, backward) == ({4}, {2})


@pytest.mark.parametrize("way", WAYS)
def test_gathers_over_fewer_ranks_train_as_unsharded_and_fsdp2(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:trains", way=way, policy=False)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_what_is_kept_has_the_compute_dtype(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:trains", way=way, policy=True)


def order_of_collectives(way: str) -> list[str]:
    model = fully_shard(nn.Sequential(Layer(8), Layer(8), Layer(8)), units=["*"], reshard_after_forward=2)
    call = call_of(model, way)
    x = torch.randn(8, 8, requires_grad=True)
    for _ in range(2):
        call(x).square().mean().backward()
    with recorded_regions() as regions:
        call(x).square().mean().backward()
    names = [name.removeprefix("FSDP:") for name in regions if not name.endswith("_compute")]
    return [name for name, _ in itertools.groupby(names)]


def test_the_sequence_of_collectives_is_the_same(four_ranks: RankPool) -> None:
    found, fallback = (four_ranks.run(f"{HERE}:order_of_collectives", way=way)[0] for way in ("aot_eager", "fallback"))
    # The parts that the last unit kept are gathered again; without a number its two gathers are one behind the other.
    assert (
        found
        == fallback
        == [
            *("0:all_gather", "1:all_gather", "2:all_gather", "1:all_gather", "0:all_gather"),
            *("2:reduce_scatter", "1:reduce_scatter", "0:reduce_scatter"),
        ]
    )


def memory_between(way: str) -> None:
    """Between forward and backward a rank holds a half of each parameter, on four ranks; behind it nothing."""
    model, _ = build(lambda: Transformer(layers=2))
    fully_shard(model, units=["layers.*"], reshard_after_forward=2)
    (batch,) = token_batches(1, 4, 8)
    loss = call_of(model, way)(*my_share(batch))
    units = [unit for unit in map(unit_of, model.modules()) if unit is not None]
    params = [param for unit in units for param in unit.params]
    assert all(param.placeholder.untyped_storage().size() == 0 for param in params)
    if way == "fallback":
        for param in params:
            assert param.kept_part.shape == (-(-param.rows // 2), *param.full_shape[1:])
    loss.backward()
    assert all(param.kept_part is None for param in params)
    with torch.no_grad():
        call_of(model, way)(*my_share(batch))
    assert all(param.kept_part is None for param in params)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_a_part_is_kept_between_forward_and_backward_only(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:memory_between", way=way)


def written_in_between(way: str) -> None:
    model, _ = build(lambda: Transformer(layers=1))
    fully_shard(model, units=["layers.*"], reshard_after_forward=2)
    (batch,) = token_batches(1, 4, 8)
    loss = call_of(model, way)(*my_share(batch))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    with pytest.raises(StaleParametersError):
        loss.backward()


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_a_write_between_forward_and_backward_is_refused(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:written_in_between", way=way)


def layer_by_layer() -> None:
    """Each layer compiled on its own: one artifact, and the graphs' first gathers are taken as they come."""
    model, reference = build(lambda: Transformer(layers=3))
    fully_shard(model, units=["layers.*"], reshard_after_forward=2)
    for layer in model.layers:
        layer.forward = compiled(layer.forward)
    batches = token_batches(3, 4, 8)
    assert_same(train(model, batches, sharded=True), train(reference, batches, sharded=False))


def test_layers_that_are_compiled_alone_keep_parts(four_ranks: RankPool) -> None:
    four_ranks.run(f"{HERE}:layer_by_layer")


def with_replicas(way: str) -> None:
    """One rank of two keeps all: the same as not resharding. As many as there are: resharding over all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for number, reshards in ((1, False), (2, True)):
        model, reference = build(lambda: Transformer(layers=1))
        fully_shard(model, mesh=mesh, reshard_after_forward=number)
        unit = unit_of(model)
        assert unit is not None
        assert (unit.reshards_after_forward, unit.kept_group) == (reshards, None)
        batches = token_batches(1, 4, 8)
        found = train(model, batches, sharded=True, call=call_of(model, way))
        assert_same(found, train(reference, batches, sharded=False))
    for wrong in (0, 3, 4, -1, 2.0):
        with pytest.raises(OptionValueError, match="a divisor of 2, the ranks over which parameters are sharded"):
            fully_shard(Layer(4), mesh=mesh, reshard_after_forward=wrong)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_the_number_divides_the_ranks_of_one_replica(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:with_replicas", way=way)
