"""A few random models on two real ranks, compiled and in the eager fallback: numbers equal the unsharded model's."""

from __future__ import annotations

from fuzz import search_values
from tests.ranks import RankPool


def test_6_random_models_train_as_unsharded(two_ranks: RankPool) -> None:
    assert search_values(6, 7, two_ranks, ["aot_eager", "fallback"]) == (6, None)
