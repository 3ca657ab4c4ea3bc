"""How a step changes with the number of ranks: a table, and a page with curves."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

from fsdp_passes.inspect.explain import Explanation
from fsdp_passes.inspect.rows import unit_rows

ADAM_COPIES = 4  # parameter, gradient and Adam's two moments, each as large as the shard


@dataclasses.dataclass(frozen=True)
class ScalePoint:
    """One step at a number of ranks; times in microseconds, bytes of one rank.

    Attributes:
        compute_us: all operations, one behind the other.
        communication_us: all collectives, one behind the other.
        exposed_us: communication that nothing hides.
        avoidable_us: the part of it that larger inputs could hide: all but the first gather and the last reductions.
        state_bytes: shards, their gradients and Adam's moments.
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
    state = ADAM_COPIES * explanation.sharded_bytes * explanation.world_size // world_size
    return ScalePoint(world_size, step, compute, communication, exposed, avoidable, state, unsharded)


def first_exposed(points: Sequence[ScalePoint]) -> ScalePoint | None:
    """The first point at which communication is exposed that larger inputs could hide."""
    return next((point for point in points if point.avoidable_us > 0), None)


def verdict(points: Sequence[ScalePoint]) -> str:
    """Where communication stops being hidden, in one sentence."""
    found = first_exposed(points)
    ends = "but for the first gathers and the last reductions"
    if found is None:
        return f"communication is hidden at every size, {ends}"
    share = found.avoidable_us / found.step_us
    return (
        f"communication stops being hidden at {found.world_size} ranks: {found.avoidable_us / 1e3:.3f} ms "
        f"({share:.1%} of the step) stay exposed that larger inputs could hide, {ends}"
    )


def scale_text(explanation: Explanation, points: Sequence[ScalePoint]) -> str:
    """A table, one line per number of ranks, and the verdict."""
    cluster = explanation.cluster
    lines = [
        f"{explanation.name} on {cluster.accelerator.name}, nodes of {cluster.per_node} joined by {cluster.inter.name}",
        f"{'ranks':>6}  {'step ms':>10}  {'compute ms':>10}  {'comm ms':>10}  {'exposed ms':>10}  {'state GiB':>10}  "
        f"{'unsharded GiB':>13}",
    ]
    for point in points:
        lines.append(
            f"{point.world_size:6}  {point.step_us / 1e3:10.3f}  {point.compute_us / 1e3:10.3f}  "
            f"{point.communication_us / 1e3:10.3f}  {point.exposed_us / 1e3:10.3f}  {point.state_bytes / 2**30:10.3f}  "
            f"{point.unsharded_bytes / 2**30:13.3f}"
        )
    return "\n".join([*lines, verdict(points)])


# ---- the page --------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 64, 16, 16, 40
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --grid: #ccc; --one: #0060a8; --two: #b34700; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #eee; --paper: #161616; --grid: #444; --one: #6db6ff; --two: #ffa563; }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5rem auto;
       max-width: 44rem; padding: 0 1rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
.grid { stroke: var(--grid); } .one { stroke: var(--one); fill: none; stroke-width: 2; }
.two { stroke: var(--two); fill: none; stroke-width: 2; stroke-dasharray: 7 4; }
pre { overflow-x: auto; }
"""
Series = tuple[str, str, Callable[[ScalePoint], float]]


def scale_page(explanation: Explanation, points: Sequence[ScalePoint]) -> str:
    """One self-contained HTML page: step and compute time, exposed communication, memory, over the number of ranks."""
    charts = [
        ("Time of one step, ms", [("step", "one", _step_ms), ("compute", "two", _compute_ms)]),
        ("Exposed communication, ms", [("all", "one", _exposed_ms), ("avoidable", "two", _avoidable_ms)]),
        ("Memory of one rank, GiB", [("shards and Adam", "one", _state_gib), ("unsharded", "two", _unsharded_gib)]),
    ]
    title = html.escape(f"{explanation.name} over {points[0].world_size} to {points[-1].world_size} ranks")
    body = "".join(f"<h2>{html.escape(name)}</h2>{_chart(name, points, series)}" for name, series in charts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{html.escape(verdict(points))}.</p>{body}"
        f"<pre>{html.escape(scale_text(explanation, points))}</pre></html>\n"
    )


def _step_ms(point: ScalePoint) -> float:
    return point.step_us / 1e3


def _compute_ms(point: ScalePoint) -> float:
    return point.compute_us / 1e3


def _exposed_ms(point: ScalePoint) -> float:
    return point.exposed_us / 1e3


def _avoidable_ms(point: ScalePoint) -> float:
    return point.avoidable_us / 1e3


def _state_gib(point: ScalePoint) -> float:
    return point.state_bytes / 2**30


def _unsharded_gib(point: ScalePoint) -> float:
    return point.unsharded_bytes / 2**30


def _chart(title: str, points: Sequence[ScalePoint], series: Sequence[Series]) -> str:
    """An SVG with one line per series over log2 of the ranks; the axis of values begins at 0."""
    top = max(value(point) for _, _, value in series for point in points) or 1.0
    first = math.log2(points[0].world_size)
    span = math.log2(points[-1].world_size) - first or 1.0

    def x(point: ScalePoint) -> float:
        return LEFT + (math.log2(point.world_size) - first) / span * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for share in (0.0, 0.5, 1.0):
        height = y(share * top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{share * top:.4g}</text>')
    every = math.ceil(len(points) / 8)
    for point in points[::every]:
        parts.append(
            f'<text x="{x(point):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{point.world_size}</text>'
        )
    for index, (name, style, value) in enumerate(series):
        line = " ".join(f"{x(point):.1f},{y(value(point)):.1f}" for point in points)
        left = LEFT + index * 180
        parts.append(f'<polyline class="{style}" points="{line}"/>')
        parts.append(f'<line class="{style}" x1="{left}" x2="{left + 26}" y1="{HEIGHT - 8}" y2="{HEIGHT - 8}"/>')
        parts.append(f'<text x="{left + 32}" y="{HEIGHT - 4}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])
