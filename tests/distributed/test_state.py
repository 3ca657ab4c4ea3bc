"""Checkpoints, replaced parameters and delayed initialization: compiled steps afterwards use the new values."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, call_of
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train, whole

HERE = "tests.distributed.test_state"


class Uneven(Transformer):
    """Ranks have different numbers of rows: 61 and 67 do not divide by two."""

    def __init__(self) -> None:
        super().__init__(vocab=67, layers=2, hidden=61)


def make() -> nn.Module:
    return Uneven()


def sharded_pair() -> tuple[nn.Module, nn.Module]:
    model, reference = build(make)
    return fully_shard(model, units=["layers.*"]), reference


def other_values(model: nn.Module) -> dict[str, Tensor]:
    """Values to load, the same on every rank, by name."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(param.shape, generator=generator) / 10 for name, param in model.state_dict().items()}


def assert_computes_with(model: nn.Module, call: Any, reference: nn.Module, values: dict[str, Tensor]) -> None:
    """Training from `values` is as unsharded; the optimizer is made afterwards, as it must be."""
    reference.load_state_dict(values)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        assert param.placements == (Shard(0),)
        torch.testing.assert_close(whole(param), values[name], rtol=0, atol=0, msg=name)
    batches = token_batches(3, 4, 8)
    assert_same(train(model, batches, sharded=True, call=call), train(reference, batches, sharded=False))


# ---- state_dict ------------------------------------------------------------------------------------------------------


def keys_and_values(way: str) -> None:
    model, reference = sharded_pair()
    call_of(model, way)(*my_share(token_batches(1, 4, 8)[0])).backward()
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert isinstance(state[name], DTensor)
        assert state[name].shape == value.shape
        assert torch.equal(whole(state[name]), value), name
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_state_dict_has_the_keys_and_values_of_the_unsharded_model(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:keys_and_values", way=way)


def loading(way: str, assign: bool, after_first_step: bool) -> None:
    model, reference = sharded_pair()
    call = call_of(model, way)
    if after_first_step:
        call(*my_share(token_batches(1, 4, 8)[0])).backward()
        model.zero_grad()
    values = other_values(reference)
    mesh = next(iter(model.parameters())).device_mesh
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in values.items()}
    model.load_state_dict(state, assign=assign)
    assert_computes_with(model, call, reference, values)
    if after_first_step:
        # A second time, after the first was taken up.
        model.load_state_dict({name: value * 2 for name, value in state.items()}, assign=assign)
        assert_computes_with(model, call, reference, {name: value * 2 for name, value in values.items()})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("after_first_step", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_steps_after_load_state_dict_use_the_loaded_values(
    two_ranks: RankPool, assign: bool, after_first_step: bool, way: str
) -> None:
    two_ranks.run(f"{HERE}:loading", way=way, assign=assign, after_first_step=after_first_step)


def written_in_place(way: str) -> None:
    """Users also write into the sharded parameters themselves, or into their local rows."""
    model, reference = sharded_pair()
    call = call_of(model, way)
    call(*my_share(token_batches(1, 4, 8)[0])).backward()
    model.zero_grad()
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            if index % 2:
                param.mul_(0.5)
            else:
                param.to_local().mul_(0.5)
    assert_computes_with(model, call, reference, {n: p / 2 for n, p in reference.state_dict().items()})


@pytest.mark.parametrize("way", WAYS)
def test_steps_after_writing_into_sharded_parameters_use_the_new_values(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:written_in_place", way=way)


def cast_after_sharding(way: str) -> None:
    """`model.to(dtype)` after sharding replaces every local tensor."""
    model, reference = sharded_pair()
    call = call_of(model, way)
    call(*my_share(token_batches(1, 4, 8)[0])).backward()
    model.zero_grad()
    model.double()
    values = {name: value.double() for name, value in reference.state_dict().items()}
    assert_computes_with(model, call, reference.double(), values)
    assert all(param.dtype == torch.float64 for param in model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_steps_after_casting_the_sharded_model_compute_in_the_new_dtype(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:cast_after_sharding", way=way)


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def saved_and_resumed(way: str, folder: str) -> None:
    """Four steps at once equal two steps, a checkpoint, a new model and two more steps; AdamW's state included."""
    batches = token_batches(4, 4, 8)
    model, reference = sharded_pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    expected_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)

    def step(call: Any, opt: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> None:
        call(*batch).backward()
        opt.step()
        opt.zero_grad()

    call = call_of(model, way)
    for batch in batches[:2]:
        step(call, optimizer, my_share(batch))
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)

    torch.manual_seed(99)
    resumed = fully_shard(make(), units=["layers.*"])
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2, eps=1e-4)
    states = dict(zip(("model", "optimizer"), get_state_dict(resumed, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(resumed, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    call = call_of(resumed, way)
    for batch in batches[2:]:
        step(call, optimizer, my_share(batch))
    for batch in batches:
        step(reference, expected_optimizer, batch)
    for (name, param), expected in zip(resumed.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected.detach(), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_resumed_from_a_distributed_checkpoint_continues_as_if_never_interrupted(
    two_ranks: RankPool, tmp_path: pathlib.Path, way: str
) -> None:
    two_ranks.run(f"{HERE}:saved_and_resumed", way=way, folder=str(tmp_path))


def loaded_by_fsdp2(folder: str) -> None:
    """A checkpoint of ours loads into a model of FSDP2 and into an unsharded one, and the other way round."""
    model, _ = sharded_pair()
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    torch.manual_seed(99)
    theirs, plain = make(), make()
    for layer in theirs.layers:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(theirs)
    for other in (theirs, plain):
        state = {"model": get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state["model"])
        for (name, param), mine in zip(other.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(whole(param), whole(mine)), name
    dist.barrier()
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(1)
    dcp.save({"model": get_model_state_dict(theirs)}, checkpoint_id=f"{folder}/back")
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=f"{folder}/back")
    set_model_state_dict(model, state["model"])
    for (name, param), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(whole(param), whole(other)), name


def test_checkpoints_are_exchanged_with_fsdp2_and_with_unsharded_models(
    two_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    two_ranks.run(f"{HERE}:loaded_by_fsdp2", folder=str(tmp_path))


# ---- delayed initialization ------------------------------------------------------------------------------------------


def meta_device(way: str, how: str) -> None:
    """Sharded on the meta device, then given memory and values; the shards are those of a model made whole."""
    torch.manual_seed(0)
    reference = make()
    values = copy.deepcopy(reference.state_dict())
    with torch.device("meta"):
        model = make()
    fully_shard(model, units=["layers.*"])
    assert all(param.is_meta for param in model.parameters())
    call = call_of(model, way)
    if how == "init":
        model.to_empty(device="cpu")
        mesh = next(iter(model.parameters())).device_mesh
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(distribute_tensor(values[name], mesh, [Shard(0)]))
    elif how == "full_state_dict":
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(values) if dist.get_rank() == 0 else {}, options=options)
    else:
        mesh = next(iter(model.parameters())).device_mesh
        state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in values.items()}
        model.load_state_dict(state, assign=True)
    assert_computes_with(model, call, reference, values)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["init", "full_state_dict", "assign"])
def test_a_model_sharded_on_the_meta_device_trains_as_one_that_was_made_whole(
    two_ranks: RankPool, how: str, way: str
) -> None:
    two_ranks.run(f"{HERE}:meta_device", way=way, how=how)
