"""GPU tests: two NCCL ranks, on two GPUs or sharing one; and emulated ranks in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bench.emulated import EmulatedGroup, LinkModel, init_emulated_group
from tests.ranks import RankPool

EMULATED_RANKS = 8


def _reason_to_skip() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.device_count() < 2 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return "needs two GPUs, or one shared by two NCCL ranks (see tools/test_gpu)"
    return None


@pytest.fixture(scope="session")
def two_nccl_ranks() -> Iterator[RankPool]:
    reason = _reason_to_skip()
    if reason:
        pytest.skip(reason)
    pool = RankPool(2, backend="nccl")
    yield pool
    pool.close()


@pytest.fixture
def group() -> Iterator[EmulatedGroup]:
    """The default group: `EMULATED_RANKS` ranks over a link of 100 GB/s."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield init_emulated_group(LinkModel.from_gb_per_s(EMULATED_RANKS, 100.0, latency_us=15.0), "cuda")
    dist.destroy_process_group()
