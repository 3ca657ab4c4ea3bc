"""What `assert_same_steps` says: the GPU tests' messages, on real ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_passes import fully_shard
from tests.ranks import RankPool
from tests.steps import assert_same_steps, record_steps
from tests.training import build

HERE = "tests.distributed.test_steps"


def says_what_differs() -> str:
    model, reference = build(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)))
    loss = nn.Sequential(model, _Mean())
    fully_shard(model)
    batches = [(torch.randn(4, 4, generator=torch.Generator().manual_seed(i)),) for i in range(3)]
    found = record_steps(model, batches, sharded=True, call=loss, clip=1.0)
    expected = record_steps(reference, batches, sharded=False, call=nn.Sequential(reference, _Mean()), clip=1.0)
    assert_same_steps(found, expected, "the same")
    wrong = copy.deepcopy(found)
    wrong[1].grads["0.weight"][1, 2:] = torch.tensor([7.0, torch.nan])
    wrong[1].loss += 1.0
    wrong[2].params["1.bias"] += 1.0
    with pytest.raises(AssertionError) as error:
        assert_same_steps(wrong, expected, "a wrong run")
    return str(error.value)


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_the_first_step_that_differs_is_told_with_all_that_differs_in_it(two_ranks: RankPool) -> None:
    for rank, text in enumerate(two_ranks.run(f"{HERE}:says_what_differs")):
        head, loss, grad = text.split("\n  ")
        assert head == f"a wrong run: step 1 of 3 is the first to differ on rank {rank}:"
        assert loss.startswith("loss: ")
        rows = 3 - rank
        assert grad.startswith(
            f"grads 0.weight: 2 of {4 * rows} numbers in 1 of {rows} rows, most at (1, 3): nan, expected "
        )
