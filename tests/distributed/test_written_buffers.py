"""Models that write into buffers in their forward train as unsharded: no gradient sees what was written later."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, assert_trains_as_unsharded, float_batches
from tests.ranks import RankPool

HERE = "tests.distributed.test_written_buffers"

DIM = 12


class Averaged(nn.Module):
    """Multiplies by averages that it updates first, by a part of them that is written alone, and by an old value."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)
        self.register_buffer("averages", torch.ones(2, DIM))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        before = self.averages.clone()
        old, _ = self.averages.unbind(0)
        scale = torch.exp(old)
        self.calls.add_(1)
        self.averages[0].mul_(0.9)
        self.averages[1].lerp_(self.proj.weight.detach().mean(0), 0.3)
        scale = scale * self.averages[0] * self.averages.view(2, 3, 4)[1].reshape(DIM) * torch.sin(before.sum(0))
        return torch.tanh(self.proj(x)) * scale / (1 + self.calls)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Averaged() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() * 10


def trains_as_unsharded(way: str) -> None:
    shard = functools.partial(fully_shard, units=["layers.*"])
    assert_trains_as_unsharded(Layers, float_batches(3, 8, DIM), way=way, shard=shard, clip=None, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_through_a_buffer_that_the_forward_writes_are_those_of_the_unsharded_model(
    two_ranks: RankPool, way: str
) -> None:
    two_ranks.run(f"{HERE}:trains_as_unsharded", way=way)
