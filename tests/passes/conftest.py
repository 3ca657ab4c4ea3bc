"""Fixtures of the passes' tests."""

from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import one_rank as one_rank
