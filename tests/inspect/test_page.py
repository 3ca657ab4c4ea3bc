"""The page as text: self-contained, escaped, with its numbers readable without a script."""

from __future__ import annotations

import json
import re

from fsdp_passes.cost.timeline import MemoryPoint, Span, Timeline
from fsdp_passes.inspect.page import PageSection, timeline_page
from tests.inspect.timelines import forward_and_backward

SMALL = Timeline(
    "small",
    (
        Span("communication", "layers.0", "forward", "all_gather", "gather", 0.0, 10.0, 1 << 20, 10.0, "starts late"),
        Span("compute", "layers.0", "forward", "compute", "mm", 10.0, 30.0),
        Span("communication", "layers.1", "forward", "all_gather", "gather", 35.0, 15.0, 1 << 20, 10.0, "too short"),
        Span("compute", "layers.1", "backward", "compute", "mm", 60.0, 40.0),
    ),
    (MemoryPoint(0.0, 1 << 20), MemoryPoint(35.0, 2 << 20), MemoryPoint(35.0, 3 << 20), MemoryPoint(100.0, 0)),
)


def data_of(page: str) -> dict[str, object]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.S)
    return dict(json.loads(text))


def test_the_page_loads_nothing() -> None:
    page = timeline_page("t", [PageSection("s", [SMALL])])
    assert re.findall(r"https?://[^\"' ]+", page) == []
    assert "default-src 'none'" in page
    assert not re.search(r"<(link|img|iframe|script src)", page)
    assert "$" not in re.sub(r"\$\{", "", page)  # no placeholder is left


def test_names_cannot_break_out_of_the_page() -> None:
    bad = '</script><b a="&">'
    span = Span("compute", bad, "forward", "compute", bad, 0.0, 1.0)
    page = timeline_page(bad, [PageSection(bad, [Timeline(bad, (span,))])])
    assert bad not in page
    assert data_of(page)["units"] == [bad]
    assert page.count("</script>") == 2  # the two that the template ends


def test_exposed_parts_and_pauses_are_where_compute_is_idle() -> None:
    (section,) = data_of(timeline_page("t", [PageSection("s", [SMALL])]))["sections"]  # type: ignore[misc]
    (timeline,) = section["timelines"]
    compute, communication = timeline["rows"]
    assert (compute["name"], communication["name"]) == ("compute", "communication")
    assert [span[9] for span in communication["spans"]] == [[[0.0, 10.0]], [[40.0, 50.0]]]
    assert compute["gaps"] == [
        [0.0, 10.0, True, "runs meanwhile: all-gather of layers.0"],
        [40.0, 50.0, True, "runs meanwhile: all-gather of layers.1"],
        [50.0, 60.0, False, ""],
    ]
    assert timeline["phases"] == [[1, 10.0, 40.0], [2, 60.0, 100.0]]
    assert timeline["memory"] == [[0.0, 1 << 20], [35.0, 3 << 20], [100.0, 0]]


def test_the_summary_compares_with_the_first_timeline() -> None:
    before = forward_and_backward(2, is_ahead=False, title="before")
    after = forward_and_backward(2, is_ahead=True, title="after")
    page = timeline_page("t", [PageSection("s", [before, after])])
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page)
    assert [name for name, _ in rows] == ["before", "after"]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for _, row in rows]
    assert cells[0][0] == "11.4 ms"  # 6 * (1000 + 600) + 3 * 600
    assert cells[1][0] == '6.6 ms<span class="change">-42 %</span>'  # 6 * 1000 + 600
    assert (cells[0][4], cells[1][4]) == ("0 %", "83 %")


def test_an_empty_section_and_an_empty_timeline_are_said_to_be_so() -> None:
    page = timeline_page("t", [PageSection("nothing", []), PageSection("empty", [Timeline("none", ())])])
    assert "Nothing was recorded." in page
    assert '<th scope="row">none</th><td data-name="time">0 µs</td>' in page


def test_units_keep_their_colour_in_all_sections() -> None:
    other = Timeline("other", (Span("compute", "layers.1", "", "compute", "mm", 0.0, 1.0),))
    data = data_of(timeline_page("t", [PageSection("s", [SMALL]), PageSection("o", [other])]))
    assert data["units"] == ["layers.0", "layers.1"]
    assert data["sections"][1]["timelines"][0]["rows"][0]["spans"][0][2] == 1  # type: ignore[index]
