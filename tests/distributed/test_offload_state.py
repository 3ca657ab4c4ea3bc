"""State, copies and other features with parameters on the CPU: each against the unsharded model on the same batches."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, call_of, float_batches
from tests.distributed.test_scalars import Model as WithScalars
from tests.distributed.test_tensor_parallel import Model as Parallel
from tests.distributed.test_tensor_parallel import mesh_of, my_rows, parallelized
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, train, whole

HERE = "tests.distributed.test_offload_state"
BATCHES = token_batches(4, 4, 8)


def small() -> Transformer:
    """61 rows on two ranks: the last has one row less, and padding."""
    return Transformer(layers=2, hidden=61)


def offloaded(model: nn.Module) -> Any:
    return fully_shard(model, units=["layers.*"], offload_policy=CPUOffloadPolicy())


def by_fsdp2(model: Transformer) -> nn.Module:
    for module in (*model.layers, model):
        fsdp2.fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model


def loads_state(way: str, assign: bool) -> None:
    """Into a model that has trained, so that a graph and gathered values could be stale."""
    torch.manual_seed(1)
    source = small()
    other = offloaded(copy.deepcopy(source))
    model, _ = build(small)
    call = call_of(offloaded(model), way)
    train(model, BATCHES[:1], sharded=True, call=call)
    values = {name: value.clone() for name, value in other.state_dict().items()}
    model.load_state_dict(values, assign=assign)
    for name, param in model.named_parameters():
        assert param.device.type == "cpu"
        assert torch.equal(whole(param), source.get_parameter(name)), name
    assert_same(train(model, BATCHES, sharded=True, call=call), train(source, BATCHES, sharded=False))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_offloaded_parameters_take_loaded_values(two_ranks: RankPool, way: str, assign: bool) -> None:
    two_ranks.run(f"{HERE}:loads_state", way=way, assign=assign)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def steps(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, batches: Any, *, sharded: bool) -> Any:
    return train(model, batches, sharded=sharded, call=call, clip=None, optimizer=lambda *_, **__: optimizer)


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)


def checkpoints(way: str, folder: str) -> None:
    """Two steps and a checkpoint; from it, two more: offloaded and made on the meta device, on the device, by FSDP2
    with its own offload; and back from FSDP2's."""
    model, reference = build(small)
    twin, expected_optimizer = by_fsdp2(copy.deepcopy(reference)), adam(reference)
    optimizer, theirs = adam(offloaded(model)), adam(twin)
    steps(model, call_of(model, way), optimizer, BATCHES[:2], sharded=True)
    steps(twin, twin, theirs, BATCHES[:2], sharded=True)
    steps(reference, reference, expected_optimizer, BATCHES[:2], sharded=False)
    for name, trained, own in (("ours", model, optimizer), ("fsdp2", twin, theirs)):
        dcp.save(states_of(trained, own), checkpoint_id=f"{folder}/{name}")
    expected = steps(reference, reference, expected_optimizer, BATCHES[2:], sharded=False)
    torch.manual_seed(9)
    with torch.device("meta"):
        empty = small()
    offloaded(empty).to_empty(device="cpu")
    resumed = {
        "ours": [empty, fully_shard(small(), units=["layers.*"]), by_fsdp2(small())],
        "fsdp2": [offloaded(small())],
    }
    for name, models in resumed.items():
        for each in models:
            own = adam(each)
            states = states_of(each, own)
            dcp.load(states, checkpoint_id=f"{folder}/{name}")
            set_state_dict(each, own, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
            call = each if isinstance(each, fsdp2.FSDPModule) else call_of(each, way)
            assert_same(steps(each, call, own, BATCHES[2:], sharded=True), expected)


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_of_offloaded_parameters_go_on_with_and_without_offload_and_in_fsdp2(
    two_ranks: RankPool, tmp_path: pathlib.Path, way: str
) -> None:
    two_ranks.run(f"{HERE}:checkpoints", way=way, folder=str(tmp_path))


def copied(way: str) -> None:
    """The original goes on, and its copy, from the same values on."""
    model, reference = build(small)
    call = call_of(offloaded(model), way)
    assert_same(train(model, BATCHES[:1], sharded=True, call=call), train(reference, BATCHES[:1], sharded=False))
    twin, other = copy.deepcopy(model), copy.deepcopy(reference)
    for each, run, expected in ((model, call, reference), (twin, call_of(twin, way), other)):
        found = train(each, BATCHES[1:], sharded=True, call=run)
        assert_same(found, train(expected, BATCHES[1:], sharded=False))
        assert {param.device.type for param in each.parameters()} == {"cpu"}


def with_scalars(way: str) -> None:
    """Whole on every rank, on the device; averaged like the offloaded gradients beside them."""
    batches = float_batches(3, 4, 8)
    model, reference = build(WithScalars)
    call = call_of(offloaded(model), way)
    assert_same(train(model, batches, sharded=True, call=call), train(reference, batches, sharded=False))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["copied", "with_scalars"])
def test_offloaded_models_train_as_unsharded(two_ranks: RankPool, case: str, way: str) -> None:
    two_ranks.run(f"{HERE}:{case}", way=way)


def tensor_parallel(way: str) -> None:
    """What tensor parallelism left of a parameter is sharded over the other dimension, and lives on the CPU."""
    mesh = mesh_of()
    model, reference = build(Parallel)
    fully_shard(parallelized(model, mesh), mesh=mesh["dp"], units=["layers.*"], offload_policy=CPUOffloadPolicy())
    assert [str(p) for p in model.layers[0].down.weight.placements] == ["S(0)", "S(1)"]
    call = call_of(model, way)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for (batch,) in float_batches(3, 8, 8):
        call(my_rows(batch, mesh)).backward()
        reference(batch).backward()
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert param.grad.to_local().device.type == "cpu"
            torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-6, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected.detach(), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_tensor_parallel_layers_are_offloaded(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:tensor_parallel", way=way)
