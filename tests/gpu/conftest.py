"""GPU tests: two NCCL ranks, on two GPUs or sharing one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import RankPool


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
