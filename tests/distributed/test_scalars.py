"""Parameters without dimensions: replicated, with averaged gradients."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, call_of, float_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train, whole

HERE = "tests.distributed.test_scalars"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.exp()


class Model(nn.Module):
    """A scale in each unit, one in the root, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(), Scaled()])
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor(0.25), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x) - self.layers[1](x)
        return (y * self.logit_scale + self.shift - x[:, :5]).square().mean()


def trains_saves_and_resumes(way: str, folder: str) -> None:
    batches = float_batches(4, 4, 8)
    model, reference = build(Model)
    fully_shard(model, units=["layers.*"])
    assert isinstance(model.logit_scale, DTensor)
    assert model.logit_scale.placements == (Replicate(),)
    assert_same(
        train(model, batches[:2], sharded=True, call=call_of(model, way)), train(reference, batches[:2], sharded=False)
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    torch.manual_seed(9)
    with torch.device("meta"):
        resumed = Model()
    fully_shard(resumed, units=["layers.*"]).to_empty(device="cpu")
    optimizer = torch.optim.AdamW([p for p in resumed.parameters() if p.requires_grad])
    states = dict(zip(("model", "optimizer"), get_state_dict(resumed, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(resumed, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    for copied in (resumed, copy.deepcopy(resumed)):
        expected = train(copy.deepcopy(reference), batches[2:], sharded=False)
        assert_same(train(copied, batches[2:], sharded=True, call=call_of(copied, way)), expected)


@pytest.mark.parametrize("way", WAYS)
def test_scalars_train_as_replicated_parameters(two_ranks: RankPool, tmp_path: pathlib.Path, way: str) -> None:
    two_ranks.run(f"{HERE}:trains_saves_and_resumes", way=way, folder=str(tmp_path))


def accumulated(way: str) -> None:
    model, reference = build(Model)
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)
    for index, batch in enumerate(float_batches(3, 4, 8)):
        model.set_requires_gradient_sync(index == 2)
        call(*my_share(batch)).backward()
        reference(*batch).backward()
        assert (model.logit_scale.grad is None) == (index < 2)
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(whole(param.grad), other.grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_scalars_accumulate_without_sync(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:accumulated", way=way)


def in_bf16(way: str) -> None:
    model = fully_shard(Scaled(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    out = call_of(model, way)(torch.ones(2, 8))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert model.scale.dtype == model.scale.grad.dtype == torch.float32


@pytest.mark.parametrize("way", WAYS)
def test_scalars_are_cast_to_the_compute_dtype(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:in_bf16", way=way)
