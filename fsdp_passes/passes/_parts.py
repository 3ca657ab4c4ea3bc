"""What the bucketing passes share: which parameters of a unit travel together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import fx

from fsdp_passes.arguments import ReduceGrad, ReduceReplicas, Unshard
from fsdp_passes.ops import REDUCE_GRAD, UNSHARD
from fsdp_passes.schedule import ShardedShape, is_heavy

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


def split_units(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    num_bytes: Callable[[fx.Node], int],
    *,
    exposed_end: str,
    is_one_run: Callable[[fx.Node], bool] = lambda node: False,
) -> dict[fx.Node, Part]:
    """The part of each `unshard` or `reduce_grad` node; `nodes` in graph order.

    A run is split in halves where nothing can hide its communication: with `exposed_end` "first" when it is read before
    anything heavy has run (the unit's compute begins with the first half and hides the second), with "last" when it is
    made when nothing heavy is left (the first half travels while the gradients of the second are computed).

    `is_one_run`: nodes of units that stay one run wherever their nodes lie.
    """
    parts = split_runs(nodes, unit_of=_unit_of)
    parts.update({node: Part() for node in nodes if is_one_run(node)})
    position = {node: index for index, node in enumerate(graph.nodes)}
    heavy = [position[node] for node in graph.nodes if is_heavy(node)]
    runs: dict[tuple[int, Part], list[fx.Node]] = {}
    for node in nodes:
        runs.setdefault((_unit_of(node), parts[node]), []).append(node)
    for (_, part), members in runs.items():
        if exposed_end == "first":
            is_exposed = not heavy or position[members[0]] < heavy[0]
        else:
            is_exposed = not heavy or position[members[-1]] > heavy[-1]
        if is_exposed:
            halves = split_in_halves(members, num_bytes, small_end=exposed_end)
            parts.update({node: Part(part.run, half) for node, half in halves.items()})
    return parts


def reduction_parts(graph: fx.Graph) -> dict[fx.Node, Part]:
    """The part of each `reduce_grad` node, in graph order. What is made last, so that nothing can hide it, is reduced
    in two halves."""
    reductions = graph.find_nodes(op="call_function", target=REDUCE_GRAD, sort=True)
    return split_units(graph, reductions, reduced_bytes, exposed_end="last")


def reduced_bytes(node: fx.Node) -> int:
    """Bytes on the wire of the whole gradient of a `reduce_grad` node, padding included."""
    call = ReduceGrad.of(node)
    return int(node.meta["val"].numel() * call.world_size * call.reduce_dtype.itemsize)


def bytes_sent_home(node: fx.Node, call: ReduceGrad | ReduceReplicas) -> int:
    """Bytes of a reduced gradient that goes to the CPU; 0 where it stays on the device."""
    return int(node.meta["val"].numel() * call.grad_dtype.itemsize) if call.home else 0


def gradient_shape(node: fx.Node) -> ShardedShape:
    """The whole gradient of a `reduce_grad` node."""
    call = ReduceGrad.of(node)
    return sharded_shape(call.grad.meta["val"], call.shard_dim, call.reduce_dtype)


def sharded_shape(whole: torch.Tensor, shard_dim: int, dtype: torch.dtype) -> ShardedShape:
    """A whole tensor that travels in `dtype`; the dimension along which it is sharded counts as its rows."""
    rows = int(whole.shape[shard_dim])
    return ShardedShape(rows, whole.numel() // rows * dtype.itemsize)


def _unit_of(node: fx.Node) -> int:
    return (Unshard if node.target is UNSHARD else ReduceGrad).of(node).unit


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
