"""The page in a real browser: drawn, usable with keyboard and pointer, on narrow screens, in the dark, and fluent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_passes.inspect.page import PageSection, timeline_page
from tests.inspect.browser import CHROMIUM, NO_CHROMIUM, Browser
from tests.inspect.timelines import forward_and_backward

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

FOCUSED = "document.activeElement.getAttribute('aria-label')"
CARD = "document.getElementById('card')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Before and after, three units each; the first gather of each direction is exposed in both."""
    timelines = [
        forward_and_backward(2, is_ahead=False, title="before"),
        forward_and_backward(2, is_ahead=True, title="after"),
    ]
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(timeline_page("two layers", [PageSection("One layer ahead", timelines)]), encoding="utf-8")
    return path


def focus_first(browser: Browser, plot: int = 0) -> None:
    browser.evaluate(f"document.querySelectorAll('.plot')[{plot}].querySelector('.item[tabindex=\"0\"]').focus()")
    browser.settle()


def test_everything_is_drawn_and_nothing_is_loaded(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.messages == []
    assert browser.requests == [page.as_uri()]
    counts = browser.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => ['.bar', '.bar.scatter', '.exposed', '.gap.waits', '.curve']"
        ".map(s => p.querySelectorAll(s).length))"
    )
    assert counts == [[15, 3, 9, 7, 1], [12, 0, 1, 1, 1]]  # a reduction and the gather behind it are one pause
    rows = browser.evaluate(
        "[...document.querySelectorAll('.plot')[0].querySelectorAll('[role=list]')].map(r => r.ariaLabel)"
    )
    assert rows == ["compute", "communication", "unsharded memory"]


def test_a_unit_has_one_colour_in_both_rows_and_others_have_others(browser: Browser, page: Path) -> None:
    browser.open(page)
    colours = browser.evaluate(
        "[0, 1, 2].map(u => [...new Set([...document.querySelectorAll(`.item[data-unit='${u}'] .bar`)]"
        ".map(b => getComputedStyle(b).fill))])"
    )
    assert [len(of_unit) for of_unit in colours] == [1, 1, 1]
    assert len({of_unit[0] for of_unit in colours}) == 3


def test_timelines_of_a_section_share_their_axis(browser: Browser, page: Path) -> None:
    """Equal compute is equally wide in both drawings."""
    browser.open(page)
    widths = browser.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => p.querySelector('[data-row=\"0\"] .bar').getBBox().width)"
    )
    assert widths[0] == pytest.approx(widths[1], abs=0.1)


def test_the_keyboard_walks_along_rows_and_between_them(browser: Browser, page: Path) -> None:
    browser.open(page)
    focus_first(browser)
    assert browser.evaluate(FOCUSED).startswith(
        "compute waits; from 0 µs to 600 µs; takes 600 µs; why runs meanwhile: "
    )
    browser.press("ArrowRight")
    assert browser.evaluate(FOCUSED).startswith("compute of root, forward; from 600 µs to 1.6 ms")
    browser.press("ArrowDown")
    assert browser.evaluate(FOCUSED).startswith("all-gather of ")
    browser.press("Home")
    spoken = browser.evaluate(FOCUSED)
    assert spoken.startswith("all-gather of root, forward; from 0 µs to 600 µs; takes 600 µs; moves 50 MiB")
    assert "exposed 600 µs (100 %); why root (forward) waits for it" in spoken
    browser.press("ArrowLeft")  # nothing is there
    assert browser.evaluate(FOCUSED) == spoken
    browser.press("End")
    assert browser.evaluate(FOCUSED).startswith("reduce-scatter of root, backward")
    browser.press("ArrowDown")
    assert browser.evaluate(FOCUSED).startswith("unsharded memory; from ")
    tabbable = browser.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('[tabindex=\"0\"]').length)"
    )
    assert tabbable == [1, 1]  # one stop of the Tab key for each timeline


def test_e_goes_to_the_next_exposed_collective(browser: Browser, page: Path) -> None:
    browser.open(page)
    focus_first(browser, 1)
    browser.press("e")
    assert "all-gather of root, forward" in browser.evaluate(FOCUSED)
    assert "exposed 600 µs" in browser.evaluate(FOCUSED)


def test_details_are_shown_on_focus_and_closed_with_escape(browser: Browser, page: Path) -> None:
    browser.open(page)
    focus_first(browser)
    assert browser.evaluate(f"{CARD}.hidden") is False
    assert "compute waits" in browser.evaluate(f"{CARD}.innerText")
    assert browser.evaluate("document.querySelectorAll('.ring').length") == 1
    browser.press("Escape")
    assert browser.evaluate(f"{CARD}.hidden") is True


def test_details_are_shown_under_the_pointer(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.point('.plot .item[aria-label^="reduce-scatter"]')
    text = browser.evaluate(f"{CARD}.innerText")
    assert "reduce-scatter of root" in text or "reduce-scatter of layers.1" in text
    faint = browser.evaluate(
        "[...document.querySelectorAll('.plot .item')].filter(i => getComputedStyle(i).opacity < 1).length"
    )
    assert faint > 0  # bars of other units step back


def test_zooming_keeps_the_focus_and_narrows_the_view(browser: Browser, page: Path) -> None:
    browser.open(page)
    focus_first(browser)
    browser.press("ArrowRight")
    before = browser.evaluate("document.querySelector('.plot [data-row=\"0\"] .bar').getBBox().width")
    spoken = browser.evaluate(FOCUSED)
    browser.press("+")
    assert browser.evaluate(FOCUSED) == spoken
    after = browser.evaluate("document.activeElement.querySelector('.bar').getBBox().width")
    assert after == pytest.approx(2 * before, rel=0.05)
    browser.press("0")
    assert browser.evaluate("document.querySelector('.window').textContent") == "0 µs to 11.4 ms"


def test_choosing_a_unit_shows_it_alone(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate("document.querySelectorAll('#units button')[1].click()")
    opacities = browser.evaluate(
        "[0, 1].map(u => getComputedStyle(document.querySelector(`.item[data-unit='${u}']`)).opacity)"
    )
    assert float(opacities[0]) < 1
    assert float(opacities[1]) == 1
    assert browser.evaluate("document.querySelectorAll('#units [aria-pressed=true]').length") == 1


def test_the_table_of_bars_says_what_the_drawing_shows(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate("document.querySelector('.all summary').click()")
    browser.settle()
    first = browser.evaluate("document.querySelector('.all tbody tr').innerText")
    assert first.split("\t") == [
        "root", "all-gather", "forward", "communication", "0 µs", "600 µs", "600 µs", "50 MiB",
        "root (forward) waits for it",
    ]  # fmt: skip
    assert browser.evaluate("document.querySelector('.all tbody').childElementCount") == 15


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [380, 1400])
def test_it_fits_the_screen_and_text_has_contrast(browser: Browser, page: Path, width: int, is_dark: bool) -> None:
    browser.open(page, width=width, is_dark=is_dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.1) == is_dark
    for selector, least in [("body", 7.0), (".help summary", 4.5), (".plot text", 4.5)]:
        style = browser.evaluate(f"(s => [s.color, s.fill])(getComputedStyle(document.querySelector('{selector}')))")
        ink = style[1] if selector.startswith(".plot") else style[0]
        assert contrast(ink, paper) >= least, f"{selector} {ink} on {paper}"
    for unit in range(3):
        labelled = browser.evaluate(
            f"[...document.querySelectorAll('.item[data-unit=\"{unit}\"]')].filter(i => i.querySelector('text'))"
            ".map(i => ['.bar', 'text'].map(s => getComputedStyle(i.querySelector(s)).fill))"
        )
        assert labelled or width == 380
        assert all(contrast(text, bar) >= 7 for bar, text in labelled)
    if width == 380:  # the details lie at the bottom, over the whole width
        focus_first(browser)
        assert browser.evaluate(f"{CARD}.getBoundingClientRect().left") == 8
        assert browser.evaluate(f"{CARD}.getBoundingClientRect().right") <= width


def test_three_thousand_bars_stay_fluent(browser: Browser, tmp_path: Path) -> None:
    """32 layers, 45 kernels each: a drawing of what is in view takes a frame's time or little more."""
    timelines = [
        forward_and_backward(32, is_ahead=False, title="before", kernels_per_unit=45),
        forward_and_backward(32, is_ahead=True, title="after", kernels_per_unit=45),
    ]
    assert all(len(timeline.spans) > 3000 for timeline in timelines)
    path = tmp_path / "large.html"
    path.write_text(timeline_page("large", [PageSection("s", timelines)]), encoding="utf-8")
    browser.open(path)
    num_elements = browser.evaluate("document.querySelectorAll('.plot *').length")
    assert num_elements < 4000  # joined where they are narrower than the screen can show
    frame_ms = browser.evaluate(
        """(async () => {
          const plot = document.querySelector('.plot'), times = [];
          for (let i = 0; i < 20; i++) {
            const begin = performance.now();
            plot.dispatchEvent(new WheelEvent('wheel', {deltaY: i < 12 ? -1 : 1, ctrlKey: true, clientX: 500}));
            await new Promise(requestAnimationFrame);
            document.body.getBoundingClientRect();
            times.push(performance.now() - begin);
          }
          return times.sort((a, b) => a - b)[10];
        })()"""
    )
    assert frame_ms < 250  # on a busy machine without a GPU; a few tens otherwise
    focus_first(browser)
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "End", "e", "ArrowUp", "Home"):
        browser.press(key)
        assert browser.evaluate("document.activeElement.matches('.item')"), key
    assert browser.messages == []


def test_bars_too_narrow_to_be_told_apart_are_told_together(browser: Browser, tmp_path: Path) -> None:
    timeline = forward_and_backward(32, is_ahead=True, title="t", kernels_per_unit=400)
    path = tmp_path / "narrow.html"
    path.write_text(timeline_page("narrow", [PageSection("s", [timeline])]), encoding="utf-8")
    browser.open(path)
    joined = browser.evaluate(
        '[...document.querySelectorAll(\'.plot [data-row="0"][data-unit="3"]\')]'
        ".map(i => [+i.dataset.count, i.ariaLabel])"
    )
    assert sum(count for count, _ in joined) == 800  # forward and backward
    assert joined[0][1].startswith(f"{joined[0][0]} bars of layers.2, forward; from ")


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as WCAG defines it."""
    channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
