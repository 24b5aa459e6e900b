"""The program that takes the pictures of the pages, and that nothing on a page is cut where a screen is narrow."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dashboard import screenshots
from dashboard.launch import DashboardServer
from dashboard.screenshots import COLOURS, PAGES, WIDTHS, browser_path, main, wait_until_whole
from tests.depth import later
from tests.factories import make_run
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Page

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
pytestmark = [
    pytest.mark.skipif(browser_path() is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.timeout(240),
]
LONGEST_MS = 60_000
"""For what comes in a second on an idle machine."""
CUT = """
() => [...document.querySelectorAll('[data-testid=stMetric] *')]
  .filter((one) => one.offsetParent && getComputedStyle(one).overflowX !== 'visible'
                   && one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.innerText)
"""
"""Texts of tiles that do not fit into their boxes."""
FITS = """
() => {  // waited for: a chart follows the size of its window a moment later
  const main = document.querySelector("[data-testid=stMain]");
  const tiles = [...document.querySelectorAll("[data-testid=stMetric]")];
  return main.scrollWidth <= main.clientWidth
    && tiles.every((tile) => tile.getBoundingClientRect().right <= innerWidth);
}
"""
"""The page is not wider than its window."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("pictures"), ranks=3, steps=30, slow={1: 1.5}).path


def test_a_picture_of_a_page_in_one_theme(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    code = main([str(run), "--out", str(tmp_path), "--pages", "ranks", "--themes", "dark", "--widths", "narrow"])
    assert code == 0, capsys.readouterr().err
    (path,) = tmp_path.iterdir()
    assert path.name == "ranks-dark-narrow.png"
    assert str(path) in capsys.readouterr().out
    picture = Image.open(io.BytesIO(path.read_bytes()))
    assert picture.width == WIDTHS["narrow"]
    assert 600 <= picture.height <= screenshots.MAX_HEIGHT
    colours = picture.convert("RGB").getcolors(COLOURS + 1)
    assert colours is not None, "reduced, so that it stays small"
    assert len(colours) > 20, "something is drawn on it"
    ground = max(colours)[1]
    assert max(ground) < 60, f"the dark theme has a dark ground, not {ground}"


@pytest.fixture(scope="module")
def opened(run: Path) -> Iterator[tuple[str, Page]]:
    """Address of a server of the run, and a page of a browser."""
    with DashboardServer(run, port=0) as server, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(LONGEST_MS)
        yield server.url, page
        browser.close()


@pytest.mark.parametrize(
    "name", [pytest.param("overview", marks=later("trials/dashboard/test_narrow_pages.py")), "findings"]
)
def test_no_page_scrolls_sideways_and_no_tile_is_cut(run: Path, opened: tuple[str, Page], name: str) -> None:
    """Of a desktop, of a window of 800 pixels with the sidebar open, and of a phone; in light and dark."""
    url, page = opened
    page.set_viewport_size({"width": 1440, "height": 1000})
    page.goto(f"{url}/{PAGES[name]}" + (f"?run={run.name}" if PAGES[name] else ""))
    page.wait_for_selector("h1")
    wait_until_whole(page, timeout_ms=120_000)
    wait_for(lambda: page.evaluate(COVERED) == [], "links of the menu that cover no other", deadline_s=100)
    for width in (1440, 800, 390):
        page.set_viewport_size({"width": width, "height": 1000})
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
            assert page.evaluate("document.documentElement.scrollWidth") <= width, theme
            page.wait_for_function(FITS)
            # The sidebar slides, and the tiles follow.
            wait_for(lambda: page.evaluate(CUT) == [], f"tiles that are not cut, {width} {theme}", deadline_s=100)


COVERED = """
() => {
  const links = [...document.querySelectorAll(".st-key-menu [data-testid=stPageLink-NavLink]")];
  const boxes = links.map((link) => link.getBoundingClientRect());
  return links.length ? links.slice(1).filter((link, i) => boxes[i].bottom > boxes[i + 1].top + 0.5)
    .map((link) => link.innerText) : ["no link"];
}
"""
"""Links of the menu that the mark of the one above, if it is the page's, covers."""
LEGENDS_BELOW_NOTHING = """
() => [...document.querySelectorAll(".rankscope-chart")].every((chart) => {
  const legend = chart.querySelector("g.legend")?.getBoundingClientRect();
  const plots = [...chart.querySelectorAll("g.draglayer rect.nsewdrag")].map((plot) => plot.getBoundingClientRect());
  return !legend || plots.every((plot) => legend.bottom <= plot.top + 2 || legend.top >= plot.bottom - 2);
})
"""
"""No legend covers a plot."""


def test_the_menu_of_a_phone_closes_when_a_page_is_chosen(run: Path, opened: tuple[str, Page]) -> None:
    """It covers the page, and its state is kept over a reload."""
    url, page = opened
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{url}/{PAGES['goodput']}?run={run.name}")
    page.locator("[data-testid=stExpandSidebarButton]").click()
    page.get_by_role("link", name="Findings", exact=True).click()
    page.get_by_role("heading", name="Findings", exact=True).wait_for()
    page.locator("[data-testid=stExpandSidebarButton]").wait_for()


def test_a_window_that_becomes_narrow_keeps_legends_off_the_plots(run: Path, opened: tuple[str, Page]) -> None:
    url, page = opened
    page.set_viewport_size({"width": 1440, "height": 1000})
    page.goto(f"{url}/{PAGES['goodput']}?run={run.name}")
    page.wait_for_selector("h1")
    wait_until_whole(page, timeout_ms=120_000)
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 1000})
        page.wait_for_function(LEGENDS_BELOW_NOTHING)
