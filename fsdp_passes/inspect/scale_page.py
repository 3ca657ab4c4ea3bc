"""The page of `scale`: curves over the number of ranks, and the table; one HTML file that loads nothing."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

from fsdp_passes.inspect.explain import Explanation
from fsdp_passes.inspect.scale import COLUMNS, NOTE, ScalePoint, cells, conditions, first_exposed, verdict

# Drawn twice, for wide and for narrow windows: letters in a scaled drawing would be too small to read on a phone.
WIDTHS = {"wide": 680, "narrow": 350}
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 234, 56, 26, 18, 40
MOST_TICKS = 6
LABEL_WIDTH = 50  # of a number of ranks, in pixels
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59626c; --paper: #fff; --grid: #d5dae0; --one: #0060a8;
        --two: #b34700; --alarm: #c1272d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8ebee; --soft: #a3adb8; --paper: #14171b; --grid: #39414a; --one: #6db6ff; --two: #ffa563;
          --alarm: #ff6b5e; }
}
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink); background: var(--paper);
       margin: 1.5rem auto; max-width: 46rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 0; }
.soft { color: var(--soft); font-size: .85rem; }
svg { display: block; } svg text { fill: var(--soft); font-size: 12px; } .narrow { display: none; }
@media (max-width: 740px) { .wide { display: none; } .narrow { display: block; } }
.grid { stroke: var(--grid); } .end { stroke: var(--alarm); stroke-dasharray: 2 4; } svg text.end { fill: var(--alarm);
stroke: none; }
.one { stroke: var(--one); fill: none; stroke-width: 2; }
.two { stroke: var(--two); fill: none; stroke-width: 2; stroke-dasharray: 7 4; }
circle.one { fill: var(--one); } circle.two { fill: var(--two); stroke-dasharray: none; }
.key { display: flex; flex-wrap: wrap; gap: 0 1.2rem; list-style: none; padding: 0; margin: .25rem 0; }
.key svg { display: inline; vertical-align: middle; margin-right: .35rem; }
.scroll { overflow-x: auto; margin-top: 2rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem 0 .2rem 1rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { padding-left: 0; position: sticky; left: 0; background: var(--paper); }
thead th { color: var(--soft); font-weight: 500; }
:focus-visible { outline: 2px solid var(--one); }
"""


@dataclasses.dataclass(frozen=True)
class _Series:
    """A curve: its name in the key, its style, and its value at a point."""

    name: str
    style: str
    value: Callable[[ScalePoint], float]


@dataclasses.dataclass(frozen=True)
class _Chart:
    """Curves over the number of ranks; values on a logarithmic axis, or on one from 0 to `top`. One of times shows from
    where communication is no longer hidden."""

    title: str
    unit: str
    series: tuple[_Series, ...]
    top: float | None = None
    is_time: bool = True


CHARTS = (
    _Chart(
        "Time of one step",
        "ms",
        (
            _Series("step", "one", lambda point: point.step_us / 1e3),
            _Series("its compute", "two", lambda point: point.compute_us / 1e3),
        ),
    ),
    _Chart(
        "Exposed communication",
        "%",
        (
            _Series("all", "one", lambda point: 100 * point.exposed_us / max(point.step_us, 1e-9)),
            _Series(
                "what larger inputs could hide",
                "two",
                lambda point: 100 * point.avoidable_us / max(point.step_us, 1e-9),
            ),
        ),
        top=100.0,
    ),
    _Chart(
        "Memory of one rank",
        "GiB",
        (
            _Series("state: shards, gradients, Adam", "one", lambda point: point.state_bytes / 2**30),
            _Series("unsharded parameters at most", "two", lambda point: point.unsharded_bytes / 2**30),
        ),
        is_time=False,
    ),
)


def scale_page(explanation: Explanation, points: Sequence[ScalePoint]) -> str:
    """One self-contained HTML page: step and compute time, the exposed part, memory, over the number of ranks."""
    title = html.escape(f"{explanation.name} over {points[0].world_size} to {points[-1].world_size} ranks")
    head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells(point))}</tr>" for point in points)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{html.escape(verdict(points))}</p>"
        f'<p class="soft">{html.escape(conditions(explanation))}. The graphs are those of '
        f"{explanation.world_size} ranks with other rows to a shard.</p>"
        f"{''.join(_chart_html(chart, points) for chart in CHARTS)}"
        f'<div class="scroll" tabindex="0" role="region" aria-label="All numbers"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{rows}</tbody></table></div><p class="soft">{html.escape(NOTE)}</p></html>\n'
    )


def _chart_html(chart: _Chart, points: Sequence[ScalePoint]) -> str:
    key = "".join(
        f'<li><svg width="28" height="8" aria-hidden="true"><line class="{series.style}" x2="28" y1="4" y2="4"/></svg>'
        f"{html.escape(series.name)}</li>"
        for series in chart.series
    )
    unit = "% of the step" if chart.unit == "%" else chart.unit
    drawings = "".join(_drawing(chart, points, name, width) for name, width in WIDTHS.items())
    return f'<h2>{html.escape(chart.title)}, {unit}</h2><ul class="key soft">{key}</ul>{drawings}'


def _drawing(chart: _Chart, points: Sequence[ScalePoint], name: str, width: int) -> str:
    low, high = _limits(chart, points)
    first = math.log2(points[0].world_size)
    span = math.log2(points[-1].world_size) - first or 1.0

    def x(point: ScalePoint) -> float:
        return LEFT + (math.log2(point.world_size) - first) / span * (width - LEFT - RIGHT)

    def y(value: float) -> float:
        share = value / high if chart.top else math.log(max(value, low) / low) / math.log(high / low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg class="{name}" width="{width}" height="{HEIGHT}" role="img" aria-label="{html.escape(chart.title)} over '
        'the number of ranks; the numbers are in the table below">'
    ]
    for tick in _ticks(chart, low, high):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,.10g}</text>'
        )
    end = first_exposed(points)
    if end is not None and chart.is_time:
        is_left = x(end) < (LEFT + width - RIGHT) / 2
        anchor, shift = ("start", 5) if is_left else ("end", -5)
        parts.append(
            f'<line class="end" x1="{x(end):.1f}" x2="{x(end):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="end" x="{x(end) + shift:.1f}" y="{TOP - 5}" text-anchor="{anchor}">no longer hidden</text>'
        )
    # Both ends are named, and what lies between them from the last number back, where there is room.
    every = math.ceil(len(points) * LABEL_WIDTH / (width - LEFT - RIGHT))
    inner = [point for point in points[::-1][::every] if x(point) - LEFT >= LABEL_WIDTH]
    for point in [points[0], *inner]:
        parts.append(
            f'<text x="{x(point):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{point.world_size}</text>'
        )
    parts.append(f'<text x="{(LEFT + width - RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle">ranks</text>')
    for series in chart.series:
        line = " ".join(f"{x(point):.1f},{y(series.value(point)):.1f}" for point in points)
        parts.append(f'<polyline class="{series.style}" points="{line}"/>')
        for point in points:
            said = f"{point.world_size} ranks: {series.value(point):.4g} {chart.unit} ({series.name})"
            parts.append(
                f'<circle class="{series.style}" cx="{x(point):.1f}" cy="{y(series.value(point)):.1f}" r="2.5">'
                f"<title>{html.escape(said)}</title></circle>"
            )
    return "".join([*parts, "</svg>"])


def _limits(chart: _Chart, points: Sequence[ScalePoint]) -> tuple[float, float]:
    """Ends of the axis of values; on a logarithmic one the next of 1, 2, 5, 10, …, powers of 10 where they are many."""
    if chart.top is not None:
        return 0.0, chart.top
    values = [value for series in chart.series for point in points if (value := series.value(point)) > 0] or [1.0]
    least, most = min(values), max(values)
    marks = _marks(least / 10, most * 10)
    low, high = max(mark for mark in marks if mark <= least), min(mark for mark in marks if mark > most)
    if len(_marks(low, high)) > MOST_TICKS:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) - 1e-9)
    return low, high


def _marks(low: float, high: float) -> list[float]:
    """The numbers of 1, 2, 5, 10, … from `low` to `high`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [step * 10.0**power for power in decades for step in (1, 2, 5)]
    return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001]


def _ticks(chart: _Chart, low: float, high: float) -> list[float]:
    if chart.top is not None:
        return [chart.top * share for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    marks = _marks(low, high)
    return marks if len(marks) <= MOST_TICKS else marks[::3]  # powers of 10, with which such an axis begins
