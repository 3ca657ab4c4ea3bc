"""The timeline page: one self-contained HTML file that draws predicted or measured timelines."""

from __future__ import annotations

import dataclasses
import html
import json
import string
from collections.abc import Hashable, Iterable, Sequence
from importlib import resources

from fsdp_passes.cost.timeline import Span, Timeline
from fsdp_passes.inspect.intervals import IntervalUnion

COMPUTE_ROW = "compute"
_PHASES = ("", "forward", "backward")
_COLUMNS = ("time", "compute", "communication", "exposed", "hidden", "peak unsharded")
_TOOLS = """\
<div class="tools" role="toolbar" aria-label="Time axis of this section">
<button type="button" aria-label="Zoom in" title="Zoom in (+)">+</button>
<button type="button" aria-label="Zoom out" title="Zoom out (-)">&minus;</button>
<button type="button" aria-label="Show all" title="Show all (0)">all</button>
<div class="overview" aria-hidden="true"><i></i></div><span class="window"></span>
</div>
<noscript><p>The drawing needs JavaScript; the numbers above do not.</p></noscript>
"""
_TABLE_OF_SPANS = """\
<details class="all"><summary>All bars as a table</summary><div class="scroll" tabindex="0"><table>
<thead><tr><th class="words">unit</th><th class="words">kind</th><th class="words">phase</th><th class="words">row</th>
<th>start</th><th>duration</th><th>exposed</th><th>bytes</th><th class="words">why</th></tr></thead><tbody></tbody>
</table></div></details>
"""


@dataclasses.dataclass(frozen=True)
class PageSection:
    """Timelines that are compared: drawn under each other on one time axis, the first is the one to compare with."""

    title: str
    timelines: Sequence[Timeline]


class _Texts:
    """Each text once; spans refer to it by number, -1 for none."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._index: dict[Hashable, int] = {"": -1}

    def index(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.all)
            self.all.append(text)
        return self._index[text]


@dataclasses.dataclass
class _Shared:
    """The texts of all sections, so that a unit has one colour on the whole page."""

    units: _Texts = dataclasses.field(default_factory=_Texts)
    kinds: _Texts = dataclasses.field(default_factory=_Texts)
    names: _Texts = dataclasses.field(default_factory=_Texts)
    reasons: _Texts = dataclasses.field(default_factory=_Texts)


def timeline_page(title: str, sections: Sequence[PageSection]) -> str:
    """One HTML document with a drawing and a table of numbers for each section; it loads nothing from anywhere.

    Each timeline is drawn as a compute row, one row for each of its communication rows, and the curve of its memory.
    Exposed parts of collectives are those during which the timeline's compute row is idle.
    """
    shared = _Shared()
    for section in sections:  # colours in the order in which units run
        for timeline in section.timelines:
            for span in timeline.spans:
                shared.units.index(span.unit)
    data = {
        "sections": [
            {"timelines": [_timeline_data(timeline, shared) for timeline in section.timelines]} for section in sections
        ],
        **{field.name: getattr(shared, field.name).all for field in dataclasses.fields(shared)},
    }
    template = string.Template(_read("page.html"))
    return template.substitute(
        title=html.escape(title),
        style=_read("page.css"),
        script=_read("page_items.js") + _read("page.js"),
        sections="".join(_section_html(section, number) for number, section in enumerate(sections)),
        data=_json_in_html(data),
    )


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json_in_html(data: object) -> str:
    """JSON that cannot end the script element that holds it, whatever a kernel is called."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def _timeline_data(timeline: Timeline, shared: _Shared) -> dict[str, object]:
    by_row: dict[str, list[Span]] = {COMPUTE_ROW: []}
    for span in timeline.spans:
        by_row.setdefault(span.row, []).append(span)
    compute = IntervalUnion((span.start_us, span.end_us) for span in by_row[COMPUTE_ROW])
    exposed = [part for span in timeline.spans for part in _exposed_parts(span, compute)]
    rows = [
        {
            "name": row,
            "spans": [_span_data(span, compute, shared) for span in sorted(spans, key=lambda span: span.start_us)],
            "gaps": _gaps(timeline, compute, IntervalUnion(exposed)) if row == COMPUTE_ROW else [],
        }
        for row, spans in sorted(by_row.items(), key=lambda item: _row_order(item[0]))
    ]
    return {
        "total": _short(timeline.total_us),
        "rows": rows,
        # Of several changes at one time only the last is seen.
        "memory": [*map(list, {_short(point.time_us): point.num_bytes for point in timeline.memory}.items())],
        "phases": _phases(timeline.spans),
    }


def _row_order(row: str) -> tuple[int, str]:
    return (0 if row == COMPUTE_ROW else 1 if row.startswith("communication") else 2, row)


def _short(time_us: float) -> float:
    """Nanoseconds are enough; shorter numbers keep the page small."""
    return round(time_us, 3)


def _span_data(span: Span, compute: IntervalUnion, shared: _Shared) -> list[object]:
    """A bar in the order that page.js names; without its last entry when nothing is exposed."""
    phase = _PHASES.index(span.phase) if span.phase in _PHASES else 0
    entry: list[object] = [
        _short(span.start_us),
        _short(span.duration_us),
        shared.units.index(span.unit),
        phase,
        shared.kinds.index(span.kind or "other"),
        shared.names.index(span.name),
        span.num_bytes,
        _short(span.exposed_us),
        shared.reasons.index(span.reason),
    ]
    parts = _exposed_parts(span, compute)
    return [*entry, [[_short(begin), _short(end)] for begin, end in parts]] if parts else entry


def _exposed_parts(span: Span, compute: IntervalUnion) -> list[tuple[float, float]]:
    return compute.gaps(span.start_us, span.end_us) if span.row != COMPUTE_ROW and span.exposed_us > 0 else []


def _gaps(timeline: Timeline, compute: IntervalUnion, exposed: IntervalUnion) -> list[list[object]]:
    """[begin, end, waits for communication, why] of each pause of the compute row. One that communication covers in
    part is cut there."""
    found: list[list[object]] = []
    for begin, end in compute.gaps(0.0, timeline.total_us):
        cuts = [*((*part, True) for part in exposed.parts(begin, end))]
        cuts += [(*part, False) for part in exposed.gaps(begin, end)]
        for cut_begin, cut_end, waits in sorted(cuts):
            why = _running_between(timeline.spans, cut_begin, cut_end, waits)
            found.append([_short(cut_begin), _short(cut_end), waits, why])
    return found


def _running_between(spans: Iterable[Span], begin: float, end: float, is_exposed: bool) -> str:
    """What other rows do in a pause of the compute row: exposed collectives, or copies."""
    running = [
        f"{span.kind.replace('_', '-')} of {span.unit or 'no unit'}" if is_exposed else f"{span.row} of {span.unit}"
        for span in spans
        if span.row != COMPUTE_ROW and span.start_us < end and span.end_us > begin
        if span.exposed_us > 0 or (not is_exposed and span.kind == "other")
    ]
    return "runs meanwhile: " + ", ".join(dict.fromkeys(running)) if running else ""


def _phases(spans: Iterable[Span]) -> list[list[float]]:
    """[phase, begin, end] of each stretch in which the compute row stays in one phase."""
    found: list[list[float]] = []
    for span in sorted(spans, key=lambda span: span.start_us):
        if span.row != COMPUTE_ROW or span.phase not in _PHASES[1:]:
            continue
        phase = _PHASES.index(span.phase)
        if found and found[-1][0] == phase:
            found[-1][2] = max(found[-1][2], _short(span.end_us))
        else:
            found.append([phase, _short(span.start_us), _short(span.end_us)])
    return found


def _section_html(section: PageSection, number: int) -> str:
    heading = (
        f'<section aria-labelledby="section{number}">\n<h2 id="section{number}">{html.escape(section.title)}</h2>\n'
    )
    if not section.timelines:
        return f"{heading}<p>Nothing was recorded.</p>\n</section>\n"
    figures = "".join(_figure_html(timeline) for timeline in section.timelines)
    return f"{heading}{_summary_html(section.timelines)}{_TOOLS}{figures}</section>\n"


def _figure_html(timeline: Timeline) -> str:
    title = html.escape(timeline.title)
    source = "measured" if timeline.is_measured else "predicted"
    return (
        f"<figure><figcaption><h3>{title}</h3><span>{source}</span></figcaption>\n"
        f'<svg class="plot" role="group" aria-label="Timeline of {title}; arrow keys move between its bars"></svg>\n'
        f"{_TABLE_OF_SPANS}</figure>\n"
    )


def _summary_html(timelines: Sequence[Timeline]) -> str:
    """The numbers of each timeline, with the change against the first."""
    head = "".join(f'<th scope="col">{text}</th>' for text in ("timeline", *_COLUMNS))
    first = timelines[0]
    body = "".join(_summary_row(timeline, first if timeline is not first else None) for timeline in timelines)
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="summary">{table}</table></div>\n'


def _summary_row(timeline: Timeline, first: Timeline | None) -> str:
    communication = sum(span.duration_us for span in timeline.spans if span.row.startswith("communication"))
    hidden = f"{100 * (1 - timeline.exposed_us / communication):.0f} %" if communication else "-"
    peak = max((point.num_bytes for point in timeline.memory), default=0)
    cells = (
        _time(timeline.total_us) + _change(timeline.total_us, first.total_us if first else 0.0),
        _time(timeline.compute_us),
        _time(communication),
        _time(timeline.exposed_us) + _change(timeline.exposed_us, first.exposed_us if first else 0.0),
        hidden,
        _bytes(peak) if timeline.memory else "-",
    )
    # On a narrow screen each cell shows its column's name itself.
    columns = "".join(f'<td data-name="{name}">{cell}</td>' for name, cell in zip(_COLUMNS, cells, strict=True))
    return f'<tr><th scope="row">{html.escape(timeline.title)}</th>{columns}</tr>'


def _change(value: float, before: float) -> str:
    return f'<span class="change">{100 * (value / before - 1):+.0f} %</span>' if before else ""


def _time(time_us: float) -> str:
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if time_us >= size:
            return f"{time_us / size:.3g} {unit}" if time_us < 1000 * size else f"{time_us / size:.0f} {unit}"
    return f"{time_us:.3g} µs"


def _bytes(count: int) -> str:
    """As page_items.js writes them."""
    power = min(4, (count.bit_length() - 1) // 10) if count > 0 else 0
    value = count / 1024**power
    return f"{float(f'{value:.{4 if value >= 1000 else 3}g}'):g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
