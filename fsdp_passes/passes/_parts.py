"""What the bucketing passes share: which parameters of a unit travel together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import fx

# A collective of fewer bytes is mostly latency: two of them would take longer than the one they were.
MIN_SPLIT_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class Part:
    """Position of a bucket in its unit.

    Attributes:
        run: counts the places at which the unit is used, with another unit in between (a root's embedding and head).
        half: 0, or 1 for the second half of a run whose communication nothing can hide.
    """

    run: int = 0
    half: int = 0


def split_runs(nodes: Sequence[fx.Node], unit_of: Callable[[fx.Node], int]) -> dict[fx.Node, Part]:
    """The run of each node; `nodes` in graph order.

    A unit is split between two of its nodes when all nodes of another unit lie between them. A unit whose nodes only
    mix with its neighbour's stays whole.
    """
    span: dict[int, tuple[int, int]] = {}
    for index, node in enumerate(nodes):
        first, _ = span.get(unit_of(node), (index, index))
        span[unit_of(node)] = (first, index)
    parts: dict[fx.Node, Part] = {}
    last: dict[int, tuple[int, int]] = {}  # unit -> (position, run) of its node before
    for index, node in enumerate(nodes):
        unit = unit_of(node)
        before, run = last.get(unit, (index, 0))
        if any(before < first and end < index for other, (first, end) in span.items() if other != unit):
            run += 1
        last[unit] = (index, run)
        parts[node] = Part(run)
    return parts


def split_in_halves(
    nodes: Sequence[fx.Node], num_bytes: Callable[[fx.Node], int], *, small_end: str
) -> dict[fx.Node, int]:
    """0 or 1 for each node of one run, in graph order, so that the first half ("first") or the second ("last") has at
    most half of the bytes and is not empty; all 0 when the run is too small to be worth two collectives."""
    total = sum(num_bytes(node) for node in nodes)
    if total < MIN_SPLIT_BYTES or len(nodes) < 2:
        return dict.fromkeys(nodes, 0)
    order = list(nodes) if small_end == "first" else list(reversed(nodes))
    small = [order[0]]
    size = num_bytes(order[0])
    for node in order[1:-1]:
        size += num_bytes(node)
        if size > total / 2:
            break
        small.append(node)
    return {node: int((node in small) == (small_end == "last")) for node in nodes}
