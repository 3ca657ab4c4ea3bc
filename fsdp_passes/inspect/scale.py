"""How a step changes with the number of ranks: points, a table, and where communication stops being hidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fsdp_passes.inspect.explain import Explanation
from fsdp_passes.inspect.rows import unit_rows

HIDDEN_BELOW = 0.01  # of the step; less than predictions are exact to
ADAM_COPIES = 4  # parameter, gradient and Adam's two moments, each as large as the shard


@dataclasses.dataclass(frozen=True)
class ScalePoint:
    """One step at a number of ranks; times in microseconds, bytes of one rank.

    Attributes:
        compute_us: all operations, one behind the other.
        communication_us: all collectives, one behind the other.
        exposed_us: communication that nothing hides.
        avoidable_us: the part of it that larger inputs could hide: all but the first gather and the last reductions.
        state_bytes: shards, their gradients and Adam's moments, on the device.
        offloaded_bytes: those on the CPU.
        unsharded_bytes: most gathered parameters at once.
    """

    world_size: int
    step_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    avoidable_us: float
    state_bytes: int
    unsharded_bytes: int
    offloaded_bytes: int = 0


def scale(explanation: Explanation, world_sizes: Sequence[int]) -> list[ScalePoint]:
    """Predict the explained step for other numbers of ranks, each rank with the same inputs.

    Nothing is traced again: the graphs are the same but for the rows of the shards, which are padded anew.
    """
    return [_point(explanation, world_size) for world_size in world_sizes]


def _point(explanation: Explanation, world_size: int) -> ScalePoint:
    step = compute = communication = exposed = avoidable = 0.0
    unsharded = 0
    for graph in explanation.graphs:
        timeline = graph.model.timeline(explanation.cluster, world_size)
        step += timeline.total_us
        exposed += timeline.exposed_us
        compute += sum(span.duration_us for span in timeline.spans if span.kind == "compute")
        communication += sum(span.duration_us for span in timeline.spans if span.kind != "compute")
        rows = unit_rows(graph.model, timeline)
        avoidable += sum(row.exposed_us for row in rows if row.is_avoidable)
        unsharded = max(unsharded, max((point.num_bytes for point in timeline.memory), default=0))
    state, offloaded = (
        ADAM_COPIES * num_bytes * explanation.world_size // world_size
        for num_bytes in (explanation.sharded_bytes - explanation.offloaded_bytes, explanation.offloaded_bytes)
    )
    return ScalePoint(world_size, step, compute, communication, exposed, avoidable, state, unsharded, offloaded)


def first_exposed(points: Sequence[ScalePoint]) -> ScalePoint | None:
    """The first point at which communication is no longer hidden: at least HIDDEN_BELOW of the step is exposed that
    larger inputs could hide."""
    return next((point for point in points if point.avoidable_us >= HIDDEN_BELOW * point.step_us > 0), None)


def verdict(points: Sequence[ScalePoint]) -> str:
    """Where communication stops being hidden, in one sentence."""
    found = first_exposed(points)
    ends = "the first gathers and the last reductions are exposed at any size"
    if found is None:
        first, last = points[0].world_size, points[-1].world_size
        where = f"from {first} to {last} ranks" if last > first else f"at {first} ranks"
        return f"Communication that larger inputs could hide is hidden {where}; {ends}."
    share = found.avoidable_us / found.step_us
    return (
        f"Communication stops being hidden at {found.world_size} ranks: {found.avoidable_us / 1e3:.3f} ms "
        f"({share:.1%} of the step) are exposed that larger inputs of each rank could hide; {ends}."
    )


def conditions(explanation: Explanation) -> str:
    """What the points are predicted for, and what stays the same over all of them."""
    cluster = explanation.cluster
    return (
        f"{explanation.name}, predicted for {cluster.accelerator.name}, {cluster.per_node} to a node joined by "
        f"{cluster.intra.name}, nodes joined by {cluster.inter.name}; each rank keeps its inputs"
    )


COLUMNS = ("ranks", "step ms", "compute ms", "comm ms", "exposed ms", "exposed %", "state GiB", "unsharded GiB")
NOTE = (
    "comm: all collectives, hidden or not; state: shards, gradients and Adam's moments of one rank; unsharded: most "
    "gathered parameters at once. Activations and the optimizer's step are not in it."
)


def cells(point: ScalePoint) -> tuple[str, ...]:
    """The point as the table's cells, in the order of COLUMNS."""
    times = (point.step_us, point.compute_us, point.communication_us, point.exposed_us)
    share = 100 * point.exposed_us / point.step_us if point.step_us else 0.0
    return (
        str(point.world_size),
        *(f"{time_us / 1e3:.3f}" for time_us in times),
        f"{share:.1f}",
        f"{point.state_bytes / 2**30:.3f}",
        f"{point.unsharded_bytes / 2**30:.3f}",
    )


def scale_text(explanation: Explanation, points: Sequence[ScalePoint]) -> str:
    """A table, one line per number of ranks, and the verdict."""
    rows = [COLUMNS, *map(cells, points)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    table = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    notes = [NOTE]
    if any(point.offloaded_bytes for point in points):
        sizes = ", ".join(f"{point.offloaded_bytes / 2**30:.3f} GiB at {point.world_size}" for point in points)
        notes.append(f"On the CPU, and not in the state above: {sizes} ranks. Times are without the copies.")
    return "\n".join([conditions(explanation), *table, *notes, verdict(points)])
