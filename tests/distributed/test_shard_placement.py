"""`shard_placement_fn`: parameters sharded along other dimensions than 0."""

from __future__ import annotations

import copy
import pathlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_passes import fully_shard
from fsdp_passes.errors import ScheduleWarning
from fsdp_passes.pipeline import record_compilations
from tests.distributed.checks import call_of, compiled, float_batches
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import Result, assert_same, build, train, whole

HERE = "tests.distributed.test_shard_placement"


def last_dimension(param: nn.Parameter) -> Shard | None:
    """Matrices by columns, the rest by rows: both in one unit."""
    return Shard(-1) if param.dim() > 1 else None


class Convolutions(nn.Module):
    """Weights of shape (12, 4, 3, 3) and (4, 12, 3), sharded along dimensions in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 12, 3, padding=1)
        self.second = nn.Conv1d(12, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x.view(-1, 4, 4, 4)).relu().flatten(2)
        return self.second(y).square().mean()


def trains(way: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """61 is the number of hidden features and no dimension that ranks divide: its matrices stay by rows."""
    mesh = init_device_mesh("cpu", shape)
    model, reference = build(lambda: Transformer(layers=2, hidden=61))

    def placement(param: nn.Parameter) -> Shard | None:
        return last_dimension(param) if param.shape[-1] % mesh.size(-1) == 0 else None

    fully_shard(model, mesh=mesh, units=["layers.*"], shard_placement_fn=placement)
    twin = copy.deepcopy(reference)
    for module in (*twin.layers, twin):
        fsdp2.fully_shard(
            module,
            mesh=init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)]),
            shard_placement_fn=placement,
        )
    by_columns = 0
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert param.placements == other.placements, name
        assert torch.equal(param.to_local(), other.to_local()), name
        assert param.to_local().is_contiguous()
        by_columns += param.placements[-1] == Shard(1)
    assert by_columns == 8
    batches = token_batches(3, 4, 8)
    call = model if way == "fallback" else compiled(model, way, **options)
    with record_compilations() as records, warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        found = train(model, batches, sharded=True, call=call)
    assert len(records) == (way != "fallback")
    assert_same(found, train(reference, batches, sharded=False))
    assert_same(found, train(twin, batches, sharded=True))


@pytest.mark.parametrize("way", ["aot_eager", "inductor", "fallback"])
def test_matrices_sharded_by_columns_train_as_unsharded_and_fsdp2(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:trains", way=way, options={}, shape=(2,))


def test_packed_buckets_carry_columns(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:trains", way="aot_eager", options={"bucket_mode": "packed"}, shape=(2,))


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_columns_have_replicas(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:trains", way=way, options={}, shape=(2, 2))


def convolutions(way: str, **how: Any) -> None:
    model, reference = build(Convolutions)

    def placement(param: nn.Parameter) -> Shard:
        return Shard(1) if param.dim() > 2 else Shard(0)

    fully_shard(model, shard_placement_fn=placement, **how)
    assert model.second.weight.to_local().shape[:2] == (4, 12 // model.second.weight.device_mesh.size())
    batches = float_batches(2, 4, 64)
    found = train(model, batches, sharded=True, call=call_of(model, way))
    assert_same(found, train(reference, batches, sharded=False))


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_convolutions_are_sharded_along_a_dimension_in_the_middle(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:convolutions", way=way)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_columns_stay_on_fewer_ranks_between_forward_and_backward(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:convolutions", way=way, reshard_after_forward=2)


def accumulates(way: str) -> None:
    model, reference = build(Convolutions)
    fully_shard(model, shard_placement_fn=last_dimension_of_two)
    call = call_of(model, way)
    batches = float_batches(3, 4, 64)
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(index == 2)
        call(batch[0].chunk(2)[torch.distributed.get_rank()].clone()).backward()
        reference(*batch).backward()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-5, msg=name)


def last_dimension_of_two(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_columns_accumulate_without_sync(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:accumulates", way=way)


def checkpoints(folder: str) -> None:
    """Saved by columns, loaded by rows; and assigned, where our buffer takes over what was loaded."""
    model, reference = build(lambda: Transformer(layers=1))
    fully_shard(model, shard_placement_fn=last_dimension)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    torch.manual_seed(7)
    rows = fully_shard(Transformer(layers=1))
    state = rows.state_dict()
    dcp.load(state, checkpoint_id=folder)
    rows.load_state_dict(state)
    torch.manual_seed(8)
    columns = fully_shard(Transformer(layers=1), shard_placement_fn=last_dimension)
    columns.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    batches = token_batches(1, 4, 8)
    expected: Result = train(reference, batches, sharded=False)
    for loaded in (rows, columns):
        assert_same(train(loaded, batches, sharded=True), expected)


def test_columns_are_saved_and_loaded_as_rows(two_ranks: RankPool, tmp_path: pathlib.Path) -> None:
    two_ranks.run(f"{HERE}:checkpoints", folder=str(tmp_path))
