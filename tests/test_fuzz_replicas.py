"""Random models on a fake group of replicas, in a file of its own so that it runs beside `test_fuzz.py`."""

from __future__ import annotations

from fuzz import NUM_REPLICAS, search_invariants


def test_the_schedules_of_250_random_models_with_replicas_keep_the_invariants() -> None:
    count, failure = search_invariants(250, seed_=8, num_replicas=NUM_REPLICAS, max_leaves=4)
    assert (count, failure) == (250, None), failure
