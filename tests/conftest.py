"""Fixtures: pools of ranks that live as long as the test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gloo import use_one_thread
from tests.ranks import RankPool

use_one_thread()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
