"""State of models with replicas: the keys, placements and checkpoints of FSDP2, at other shapes of the mesh."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_passes import fully_shard, overlap_fsdp
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import Result, assert_same, build, train, whole

HERE = "tests.distributed.test_replicas_state"


def replicas_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def with_fsdp2(model: Transformer, mesh: DeviceMesh | None) -> nn.Module:
    for layer in model.layers:
        fsdp2.fully_shard(layer, mesh=mesh)
    return fsdp2.fully_shard(model, mesh=mesh)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)


def trained(model: nn.Module, steps: int, seed: int = 1, **how: Any) -> tuple[Result, torch.optim.AdamW]:
    """Train with an optimizer that is handed out. The global batch is the same whatever the number of ranks."""
    made: list[torch.optim.AdamW] = []

    def optimizer(params: Any, lr: float) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(params, lr=lr, eps=1e-6))
        return made[0]

    result = train(model, token_batches(steps, 4, 8, seed=seed), optimizer=optimizer, **how)
    return result, made[0]


def saves(folder: str) -> None:
    """Two steps on 2 x 2 ranks, saved by us and by FSDP2; keys, meshes and placements are the same."""
    model, reference = build(lambda: Transformer(layers=2, hidden=61))
    twin = with_fsdp2(copy.deepcopy(reference), replicas_mesh())
    fully_shard(model, mesh=replicas_mesh(), units=["layers.*"])
    call = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
    _, ours = trained(model, 2, sharded=True, call=call)
    _, theirs = trained(twin, 2, sharded=True)
    states, others = states_of(model, ours), states_of(twin, theirs)
    found, expected = flat(states), flat(others)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert type(found[key]) is type(value), key
        if isinstance(value, DTensor):
            assert found[key].placements == value.placements, key
            assert found[key].shape == value.shape, key
    dcp.save(states, checkpoint_id=f"{folder}/ours")
    dcp.save(others, checkpoint_id=f"{folder}/fsdp2")
    if dist.get_rank() == 0:
        trained(reference, 2, sharded=False)
        torch.save(reference.state_dict(), f"{folder}/expected.pt")


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for name, part in tree.items() for k, v in flat(part, f"{prefix}/{name}").items()}
    return {prefix: tree}


def loads(folder: str, kind: str, source: str) -> None:
    """A checkpoint of 2 x 2 ranks goes on over any other number and shape of ranks, and with either library."""
    torch.manual_seed(9)
    model = Transformer(layers=2, hidden=61)
    mesh = replicas_mesh() if kind == "replicas" else None
    sharded = with_fsdp2(model, mesh) if kind == "fsdp2" else fully_shard(model, mesh=mesh, units=["layers.*"])
    optimizer = optimizer_of(sharded)
    states = states_of(sharded, optimizer)
    dcp.load(states, checkpoint_id=f"{folder}/{source}")
    set_state_dict(sharded, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    expected = torch.load(f"{folder}/expected.pt", weights_only=True)
    for name, param in sharded.named_parameters():
        torch.testing.assert_close(whole(param), expected[name], rtol=0, atol=1e-5, msg=name)
    reference = Transformer(layers=2, hidden=61)
    reference.load_state_dict(expected)
    plain = {"lr": 0.1, "clip": None, "optimizer": torch.optim.SGD}
    batches = token_batches(2, 4, 8, seed=3)
    call = torch.compile(sharded, backend=overlap_fsdp, options={"inner": "aot_eager"}) if kind != "fsdp2" else None
    found = train(sharded, batches, sharded=True, call=call, **plain)
    assert_same(found, train(reference, batches, sharded=False, **plain))


def test_checkpoints_of_replicas_go_on_at_other_shapes_and_with_fsdp2(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    four_ranks.run(f"{HERE}:saves", folder=str(tmp_path))
    two_ranks.run(f"{HERE}:loads", folder=str(tmp_path), kind="shards", source="ours")
    two_ranks.run(f"{HERE}:loads", folder=str(tmp_path), kind="fsdp2", source="ours")
    four_ranks.run(f"{HERE}:loads", folder=str(tmp_path), kind="replicas", source="fsdp2")


def copied() -> None:
    """A copy trains on its own, and its gradients reach its replicas."""
    model, reference = build(lambda: Transformer(layers=2))
    fully_shard(model, mesh=replicas_mesh(), units=["layers.*"])
    twin = copy.deepcopy(model)
    expected, _ = trained(reference, 2, sharded=False)
    for one in (twin, model):
        found, _ = trained(one, 2, sharded=True)
        assert_same(found, expected)


def test_a_copy_has_the_same_replicas(four_ranks: RankPool) -> None:
    four_ranks.run(f"{HERE}:copied")
