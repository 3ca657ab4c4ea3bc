"""Modes of `torch.compile` on real NCCL ranks, those that record CUDA graphs included."""

from __future__ import annotations

import copy

import pytest
import torch

from fsdp_passes import fully_shard, overlap_fsdp
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.steps import assert_same_steps, record_steps

pytestmark = pytest.mark.gpu


def trains(mode: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model = Transformer(dim=64, layers=2).cuda()
    reference = copy.deepcopy(model)
    fully_shard(model, units=["layers.*"])
    batches = [tuple(t.cuda() for t in pair) for pair in token_batches(5, 8, 32)]
    call = torch.compile(model, backend=overlap_fsdp, mode=mode)
    found = record_steps(model, batches, sharded=True, call=call)
    assert_same_steps(found, record_steps(reference, batches, sharded=False), mode)


@pytest.mark.parametrize("mode", ["reduce-overhead"])  # "max-autotune" tries kernels for minutes
def test_modes_train_as_unsharded(two_nccl_ranks: RankPool, mode: str) -> None:
    two_nccl_ranks.run("tests.gpu.test_modes:trains", mode=mode)
