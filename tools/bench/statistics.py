"""Statistics of step times, and the order in which systems take turns."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Summary:
    """Median, minimum and maximum of all samples: nothing is left out."""

    median_ms: float
    min_ms: float
    max_ms: float
    num_samples: int


def summarize(samples_ms: Sequence[float]) -> Summary:
    """Of at least one sample."""
    if not samples_ms:
        raise ValueError("Expected at least one sample, found none.")
    return Summary(statistics.median(samples_ms), min(samples_ms), max(samples_ms), len(samples_ms))


def slowest_rank(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Sample by sample the time of the slowest rank: a step is over when it is over on every rank."""
    return [max(times) for times in zip(*samples_by_rank, strict=True)]


def in_turn(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """A B A B: (round, name), so that whatever drifts over time falls on every system."""
    for index in range(rounds):
        for name in names:
            yield index, name


def _largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Relative to `expected`; infinite where anything is not finite, which a maximum would pass over."""
    differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


class LossMismatch(Exception):
    """Two systems that should compute the same loss do not."""


def check_losses(losses: Mapping[str, Sequence[float]], reference: str, tolerance: float) -> dict[str, float]:
    """The largest relative difference from the reference's losses, by name.

    Raises:
        LossMismatch: one is above `tolerance`, or the reference's loss did not move by more than ten times that, so
            that wrong gradients would not have been seen.
    """
    expected = losses[reference]
    worst = {name: _largest_difference(found, expected) for name, found in losses.items()}
    wrong = [f"{name}: {losses[name]} (off by {diff:.1e})" for name, diff in worst.items() if not diff <= tolerance]
    if wrong:
        raise LossMismatch(
            f"Expected the losses of {reference}, {list(expected)}, within {tolerance:g}; found " + "; ".join(wrong)
        )
    if len(expected) > 1 and abs(expected[-1] - expected[0]) <= 10 * tolerance * abs(expected[0]):
        raise LossMismatch(
            f"Expected the loss of {reference} to move by more than {10 * tolerance:g} of itself over the steps of the "
            f"check, found {list(expected)}: the gradients were not checked. Raise the number of check steps."
        )
    return worst
