"""Parameters that tensor parallelism has distributed over one dimension of a mesh, sharded over another."""

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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from fsdp_passes import fully_shard
from fsdp_passes.errors import ForeignDTensorError
from fsdp_passes.pipeline import record_compilations
from tests.distributed.checks import call_of, float_batches
from tests.ranks import RankPool
from tests.training import build, whole

HERE = "tests.distributed.test_tensor_parallel"
WAYS = ["aot_eager", "inductor", "fallback"]


class Mlp(nn.Module):
    """Two linears that are split over ranks, and a norm that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def mesh_of(shape: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def parallelized(model: Model, mesh: DeviceMesh) -> Model:
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def with_fsdp2(model: Model, mesh: DeviceMesh, **how: Any) -> Model:
    for layer in parallelized(model, mesh).layers:
        fsdp2.fully_shard(layer, mesh=mesh["dp"], **how)
    return fsdp2.fully_shard(model, mesh=mesh["dp"], **how)


def my_rows(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """The ranks of one "tp" group compute with the same rows."""
    return batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].clone()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6, foreach=False)


def trains(way: str) -> int:
    """Losses, gradients and parameters, against FSDP2 with the same parallelism and one process. Returns the number of
    compilations."""
    mesh = mesh_of()
    model, reference = build(Model)
    twin = with_fsdp2(copy.deepcopy(reference), mesh)
    fully_shard(parallelized(model, mesh), mesh=mesh["dp"], units=["layers.*"])
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert param.placements == other.placements, name
        assert param.device_mesh == other.device_mesh, name
        assert param.shape == other.shape, name
        assert torch.equal(param.to_local(), other.to_local()), name
    call = call_of(model, way)
    optimizers = [optimizer_of(module) for module in (model, twin, reference)]
    with record_compilations() as records:
        for (batch,) in float_batches(3, 8, 8):
            losses = [call(my_rows(batch, mesh)), twin(my_rows(batch, mesh)), reference(batch)]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-6)
            triples = zip(model.named_parameters(), twin.parameters(), reference.parameters(), strict=True)
            for (name, param), other, expected in triples:
                assert param.grad.placements == other.grad.placements, name
                torch.testing.assert_close(whole(param.grad), whole(other.grad), rtol=0, atol=1e-6, msg=name)
                torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-6, msg=name)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected.detach(), rtol=0, atol=1e-5, msg=name)
    return len(records)


@pytest.mark.parametrize("way", WAYS)
def test_column_and_row_parallel_layers_train_as_unsharded_and_fsdp2(four_ranks: RankPool, way: str) -> None:
    assert four_ranks.run(f"{HERE}:trains", way=way) == [0 if way == "fallback" else 1] * 4


def accumulates(way: str) -> None:
    """Replicas of tensor-parallel layers, three dimensions in all: micro-batches without all-reduce, then without any
    sync, each followed by one with both."""
    mesh = mesh_of((2, 1, 2), ("replicate", "shard", "tp"))
    model, reference = build(Model)
    fully_shard(parallelized(model, mesh), mesh=mesh["replicate", "shard"], units=["layers.*"])
    assert [str(p) for p in model.layers[0].down.weight.placements] == ["R", "S(0)", "S(1)"]
    call = call_of(model, way)
    switches = (model.set_requires_all_reduce, model.set_requires_gradient_sync)
    for index, (batch,) in enumerate(float_batches(4, 8, 8)):
        switches[index // 2](index % 2 == 1)
        call(batch.chunk(2)[mesh["replicate"].get_local_rank()].clone()).backward()
        reference(batch).backward()
        assert (model.head.weight.grad is None) == (index == 0)
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_replicas_of_tensor_parallel_layers_accumulate(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:accumulates", way=way)


def in_bf16(way: str) -> None:
    mesh = mesh_of()
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, reference = build(Model)
    twin = with_fsdp2(reference, mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(parallelized(model, mesh), mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    ((batch,),) = float_batches(1, 8, 8)
    for loss in (call_of(model, way)(my_rows(batch, mesh)), twin(my_rows(batch, mesh))):
        loss.backward()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert param.grad.dtype == torch.float32
        torch.testing.assert_close(whole(param.grad), whole(other.grad), rtol=0.05, atol=1e-3, msg=name)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_tensor_parallel_layers_in_bf16_equal_fsdp2(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:in_bf16", way=way)


def checkpoints(folder: str) -> None:
    """Saved here, loaded by FSDP2 with the same parallelism and by an unsharded model; the optimizer's state too."""
    mesh = mesh_of()
    model, reference = build(Model)
    fully_shard(parallelized(model, mesh), mesh=mesh["dp"], units=["layers.*"])
    optimizer = optimizer_of(model)
    ((batch,),) = float_batches(1, 8, 8)
    model(my_rows(batch, mesh)).backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    torch.manual_seed(5)
    twin = with_fsdp2(Model(), mesh)
    others = optimizer_of(twin)
    state = dict(zip(("model", "optimizer"), get_state_dict(twin, others), strict=True))
    assert list(state["model"]) == list(model_state)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(twin, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    plain = {"model": reference.state_dict()}
    dcp.load(plain, checkpoint_id=folder)
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(param), whole(other)), name
        assert torch.equal(whole(param), plain["model"][name]), name
        assert torch.equal(whole(optimizer.state[param]["exp_avg"]), whole(others.state[other]["exp_avg"])), name


def test_checkpoints_of_tensor_parallel_layers_are_those_of_fsdp2(four_ranks: RankPool, tmp_path: pathlib.Path) -> None:
    four_ranks.run(f"{HERE}:checkpoints", folder=str(tmp_path))


def refused() -> None:
    """Dimensions that are not those of one mesh, or are the same one."""
    mesh, other = mesh_of(), mesh_of((4,), ("dp",))
    for wrong in (None, init_device_mesh("cpu", (4,)), mesh["tp"], other):
        model = parallelized(Model(), mesh)
        with pytest.raises(ForeignDTensorError, match=r"layers\.0\.up\.weight: .*another dimension of the same mesh"):
            fully_shard(model, mesh=wrong)
        assert not hasattr(model, "unshard")
    dist.barrier()


def test_other_meshes_than_that_of_the_parallelism_are_refused(four_ranks: RankPool) -> None:
    four_ranks.run(f"{HERE}:refused")
