"""Random models on two real ranks, compiled and in the eager fallback: numbers equal the unsharded model's."""

from __future__ import annotations

from fuzz import search_values
from tests.ranks import RankPool


def test_40_random_models_train_as_unsharded(two_ranks: RankPool) -> None:
    count, failure = search_values(40, 7, two_ranks, max_leaves=5)
    assert (count, failure) == (40, None), failure
