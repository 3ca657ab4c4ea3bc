"""scale.py and scale_page.py: where communication stops being hidden, and the page in a real browser."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_passes.cost.hardware import CLUSTERS
from fsdp_passes.inspect.scale import ScalePoint, first_exposed, verdict
from fsdp_passes.inspect.scale_page import scale_page
from tests.inspect.browser import CHROMIUM, NO_CHROMIUM, Browser

# What the page says about the model.
EXPLANATION: Any = SimpleNamespace(name="Tiny<T>", cluster=CLUSTERS["h100"], world_size=8)


def points(*avoidable_ms: float) -> list[ScalePoint]:
    """8, 16, … ranks with 100 ms of compute; 5 ms are exposed at any size, and the given ones that need not be."""
    return [
        ScalePoint(8 << i, 1e5 + 1e3 * ms + 5e3, 1e5, 3e4, 1e3 * ms + 5e3, 1e3 * ms, 2**33 >> i, 2**31)
        for i, ms in enumerate(avoidable_ms)
    ]


def test_less_than_one_percent_of_the_step_counts_as_hidden() -> None:
    assert first_exposed(points(0, 0.5, 1, 2, 400)) == points(0, 0, 0, 2)[3]
    assert first_exposed(points(0, 0.5, 1)) is None
    assert first_exposed([dataclasses.replace(points(0)[0], step_us=0.0)]) is None


def test_the_verdict_names_the_ranks_and_the_time() -> None:
    assert verdict(points(0, 0, 5)) == (
        "Communication stops being hidden at 32 ranks: 5.000 ms (4.5% of the step) are exposed that larger inputs of "
        "each rank could hide; the first gathers and the last reductions are exposed at any size."
    )
    hidden = "Communication that larger inputs could hide is hidden"
    assert verdict(points(0, 0)).startswith(f"{hidden} from 8 to 16 ranks; the first gathers and the last reductions")
    assert verdict(points(0)).startswith(f"{hidden} at 8 ranks; ")


def test_a_single_number_of_ranks_and_no_communication_can_be_drawn() -> None:
    alone = ScalePoint(1, 1e5, 1e5, 0.0, 0.0, 0.0, 2**33, 0)
    assert scale_page(EXPLANATION, [alone]).count("<polyline") == 12
    assert "nan" not in scale_page(EXPLANATION, [alone])


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_the_page_fits_wide_and_narrow_windows(tmp_path: Path) -> None:
    path = tmp_path / "scale.html"
    path.write_text(scale_page(EXPLANATION, points(0, 0, 0, 2, 5, 400, 900, 2000)), encoding="utf-8")
    browser = Browser(tmp_path / "profile")
    try:
        for width, shown in ((1400, "wide"), (390, "narrow")):
            for is_dark in (False, True):
                browser.open(path, width=width, is_dark=is_dark)
                assert (browser.messages, browser.requests) == ([], [path.as_uri()])
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                drawn = browser.evaluate(
                    "[...document.querySelectorAll('svg[role=img]')].filter(s => s.getBoundingClientRect().width)"
                    ".map(s => s.getAttribute('class'))"
                )
                assert drawn == [shown] * 3
                # Every letter lies inside of its drawing, and none is smaller than a phone can show.
                cut = browser.evaluate(
                    "[...document.querySelectorAll('svg[role=img] text')].filter(t => t.getBoundingClientRect().width)"
                    ".filter(t => { const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();"
                    " return a.left < b.left || a.right > b.right || a.top < b.top || a.bottom > b.bottom"
                    " || a.height < 12; }).map(t => t.textContent)"
                )
                assert cut == []
                # Both ends of the axis are named, and no two texts of a drawing lie over each other.
                texts = browser.evaluate(
                    "[...document.querySelectorAll('svg[role=img]')].filter(s => s.getBoundingClientRect().width).map("
                    "s => [...s.querySelectorAll('text')].map(t => { const r = t.getBoundingClientRect();"
                    " return [t.textContent, r.left, r.right, r.top, r.bottom]; }))"
                )
                for of_drawing in texts:
                    assert {"8", "1024"} <= {text for text, *_ in of_drawing}
                    for (one, left, right, top, bottom), other in itertools.combinations(of_drawing, 2):
                        apart = right <= other[1] or other[2] <= left or bottom <= other[3] or other[4] <= top
                        assert apart, (one, other[0])
        assert browser.evaluate("document.title") == "Tiny<T> over 8 to 1024 ranks"
        assert browser.evaluate("document.querySelectorAll('tbody tr').length") == 8
    finally:
        browser.close()
