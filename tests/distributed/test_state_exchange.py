"""Checkpoints between world sizes and with FSDP2, optimizer state included; copies of a sharded model."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp_passes import fully_shard
from fsdp_passes.errors import PickledModuleError
from tests.distributed.checks import WAYS, call_of
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import build, my_share, whole

HERE = "tests.distributed.test_state_exchange"
BATCHES = token_batches(4, 4, 8)


def shard_ours(model: nn.Module) -> nn.Module:
    return fully_shard(model, units=["layers.*"])


def shard_theirs(model: nn.Module) -> nn.Module:
    for module in (*model.layers, model):
        fsdp2.fully_shard(module)
    return model


SHARD = {"ours": shard_ours, "fsdp2": shard_theirs}


def prepare(library: str, way: str, seed: int = 0) -> tuple[Any, Any, torch.optim.Optimizer]:
    """The model, what to call and the optimizer. Rows of 61 and 67 divide neither by two nor by four."""
    torch.manual_seed(seed)
    model = SHARD[library](Transformer(vocab=67, layers=2, hidden=61, tied=True))
    call = call_of(model, way) if library == "ours" else model
    return model, call, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def step(call: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    call(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def state(call: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of what is called: with a compiled model the keys must not show it."""
    return {"model": get_model_state_dict(call), "optimizer": get_optimizer_state_dict(call, optimizer)}


def save_after_two_steps(library: str, way: str, folder: str) -> None:
    _, call, optimizer = prepare(library, way)
    for batch in BATCHES[:2]:
        step(call, optimizer, my_share(batch))
    dcp.save(state(call, optimizer), checkpoint_id=folder)


def load_and_take_two_steps(library: str, way: str, folder: str) -> None:
    """Two steps behind a checkpoint equal four steps of the unsharded model."""
    model, call, optimizer = prepare(library, way, seed=99)
    loaded = state(call, optimizer)
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(call, loaded["model"])
    set_optimizer_state_dict(call, optimizer, loaded["optimizer"])
    for batch in BATCHES[2:]:
        step(call, optimizer, my_share(batch))
    torch.manual_seed(0)
    reference = Transformer(vocab=67, layers=2, hidden=61, tied=True)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    for batch in BATCHES:
        step(reference, expected, batch)
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param), other.detach(), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("grows", [True, False])
def test_a_run_continues_at_another_world_size_compiled_or_not(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: pathlib.Path, grows: bool
) -> None:
    first, second = (two_ranks, four_ranks) if grows else (four_ranks, two_ranks)
    ways = WAYS if grows else WAYS[::-1]  # saved compiled and loaded uncompiled, and the other way round
    first.run(f"{HERE}:save_after_two_steps", library="ours", way=ways[0], folder=str(tmp_path))
    second.run(f"{HERE}:load_and_take_two_steps", library="ours", way=ways[1], folder=str(tmp_path))


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_fsdp2_continues_here_and_back(two_ranks: RankPool, tmp_path: pathlib.Path, way: str) -> None:
    two_ranks.run(f"{HERE}:save_after_two_steps", library="fsdp2", way=way, folder=f"{tmp_path}/theirs")
    two_ranks.run(f"{HERE}:load_and_take_two_steps", library="ours", way=way, folder=f"{tmp_path}/theirs")
    two_ranks.run(f"{HERE}:save_after_two_steps", library="ours", way=way, folder=f"{tmp_path}/ours")
    two_ranks.run(f"{HERE}:load_and_take_two_steps", library="fsdp2", way=way, folder=f"{tmp_path}/ours")


def keys(way: str) -> None:
    """The keys are those of FSDP2, of the module that is called and of the module inside."""
    states = []
    for library in ("ours", "fsdp2"):
        model, call, optimizer = prepare(library, way)
        step(call, optimizer, my_share(BATCHES[0]))
        states += [state(call, optimizer), state(model, optimizer)]
    for found in states[:3]:
        assert found["model"].keys() == states[3]["model"].keys()
        assert found["optimizer"]["state"].keys() == states[3]["optimizer"]["state"].keys()
        assert [group.keys() for group in found["optimizer"]["param_groups"]] == [
            group.keys() for group in states[3]["optimizer"]["param_groups"]
        ]
        for name, values in states[3]["optimizer"]["state"].items():
            for key, value in values.items():
                torch.testing.assert_close(
                    whole(found["optimizer"]["state"][name][key]), whole(value), rtol=0, atol=1e-5
                )


@pytest.mark.parametrize("way", WAYS)
def test_the_keys_of_model_and_optimizer_state_are_those_of_fsdp2(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:keys", way=way)


def initialized_by_the_modules(way: str) -> None:
    """`to_empty`, then `nn.init` on the sharded parameters."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
    fully_shard(model)
    call = call_of(model, way)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            nn.init.constant_(param, 0.1 * (index + 1))
    reference = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
    for index, param in enumerate(reference.parameters()):
        nn.init.constant_(param, 0.1 * (index + 1))
    x = torch.arange(32.0).reshape(4, 8) / 32
    for run in (call, reference):
        run(x).square().mean().backward()
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(param), other.detach()), name
        torch.testing.assert_close(whole(param.grad), other.grad, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_init_functions_on_empty_shards_give_the_model_that_was_made_whole(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:initialized_by_the_modules", way=way)


# ---- copies ----------------------------------------------------------------------------------------------------------


def copied(way: str) -> None:
    """A copy keeps its values while the original trains, and trains on its own afterwards; an average follows."""
    model, reference = build(lambda: Transformer(vocab=67, layers=2, hidden=61, tied=True))
    shard_ours(model)
    call = call_of(model, way)
    call(*my_share(BATCHES[0])).backward()
    model.zero_grad()
    twin, average = copy.deepcopy(model), copy.deepcopy(model)
    reference_average = copy.deepcopy(reference)
    assert twin.embed.weight is twin.head.weight
    assert {type(p) for p in twin.parameters()} == {type(p) for p in model.parameters()}
    pairs = [(model, call, reference), (twin, call_of(twin, way), copy.deepcopy(reference))]
    for trained, run, expected in pairs:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (trained, expected)]
        for batch in BATCHES[:2]:
            step(run, optimizers[0], my_share(batch))
            step(expected, optimizers[1], batch)
            if trained is model:
                with torch.no_grad():
                    for mean, module in ((average, model), (reference_average, reference)):
                        for ours, value in zip(mean.parameters(), module.parameters(), strict=True):
                            ours.lerp_(value.detach(), 0.5)
    with torch.no_grad():
        found = call_of(average, way)(*BATCHES[3])
        torch.testing.assert_close(found, reference_average(*BATCHES[3]), rtol=0, atol=1e-5)
    for trained, _, expected in [*pairs, (average, None, reference_average)]:
        for (name, param), other in zip(trained.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(whole(param), other.detach(), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_deepcopies_train_and_average_on_their_own(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:copied", way=way)


def copied_layer() -> None:
    """A copy of one unit brings nothing of the rest along."""
    model = shard_ours(Transformer(layers=2))
    layer = copy.deepcopy(model.layers[0])
    assert [unit.module for unit in layer._fsdp_unit.context.units] == [layer]
    x = torch.ones(1, 2, 32)
    assert torch.equal(layer(x), model.layers[0](x))


def pickled() -> None:
    model = shard_ours(Transformer(layers=1))
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(PickledModuleError, match="Transformer: expected state_dict"):
            save(model)
    torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize("case", ["copied_layer", "pickled"])
def test_a_layer_is_copied_alone_and_pickling_says_what_to_save_instead(two_ranks: RankPool, case: str) -> None:
    two_ranks.run(f"{HERE}:{case}")
