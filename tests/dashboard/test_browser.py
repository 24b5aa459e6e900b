"""The dashboard in a real browser, on a run that is training at that moment.

Needs Chromium (`apt-get install chromium`) and playwright, which `make` installs; without them it is skipped.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dashboard.launch import DashboardServer
from dashboard.screenshots import PAGES, SETTLED, browser_path
from tests.dashboard.questions import BROWSER
from tests.depth import usually
from tests.e2e.launched import LaunchedRun, kill, start, unhurried
from tests.factories import make_run
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Page

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
pytestmark = [
    pytest.mark.skipif(browser_path() is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.timeout(240),
]
LOSS = "document.querySelector('.st-key-overview-lines .js-plotly-plot')"
RANGE = f"{LOSS}?._fullLayout?.xaxis.range.map(Number) ?? []"  # empty while the chart is being replaced
LAST_DRAWN = (  # -Infinity while the chart is being replaced
    f"Math.max(...({LOSS}?._fullData?.find(trace => trace.name === 'loss')?.x ?? []))"
)
FAILED = "[data-testid=stException], :text('This page could not be computed'), :text('This chart could not be drawn')"
COMPUTED = ":text('Computing from the records')"
"""Stands in place of a part until its answer has come."""
SHOWN = ".js-plotly-plot .main-svg, [data-testid=stDataFrame], [class*=st-key-card-]"
"""A chart, a table or the card of a finding: a crowded machine is one."""
LONGEST_MS = 60_000
"""For what comes in a second on an idle machine."""
CLICKED_MS = 30_000
"""For what a click opens; the click of one that has not come by then fell on a chart that was being replaced."""
EMPTY = {
    "pipeline": "This run has no pipeline", "health": "No health was recorded in this run",
    "compare": "There is only one run", "logs": "without a line", "findings": "No problems found",
    "fleet": "Diagnosing the runs",
}  # fmt: skip
"""Pages on which a run of two ranks on a CPU, without a fault, may have nothing to draw, and what they say then."""
STEP = "[data-testid=stMetric]:has-text('Step') [data-testid=stMetricValue]"


@dataclass
class Visit:
    """A page in a browser, and everything that the browser complained about."""

    page: Page
    url: str
    run: LaunchedRun
    complaints: list[str] = field(default_factory=list)

    def hear(self, message: Any) -> None:
        """Keep an error of the console."""
        if message.type == "error":
            self.complaints.append(f"{message.text} {message.location}")

    def open(self, name: str) -> None:
        """Go to a page and wait until it is drawn."""
        self.page.goto(f"{self.url}/{PAGES[name]}")
        self.page.wait_for_selector("h1", timeout=LONGEST_MS)
        self.page.wait_for_selector(SETTLED, timeout=LONGEST_MS)

    def box(self, selector: str) -> Any:
        """Place and size of an element that is drawn anew with each poll, and is not there between."""
        return wait_for(self.page.locator(selector).first.bounding_box, f"the place of {selector}")

    def zoom(self) -> list[float] | None:
        """Drag over the chart of the loss; its range then, or None if that did not zoom."""
        box = self.box(".st-key-overview-lines .nsewdrag")
        self.page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.5 * box["height"])
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"], steps=8)
        self.page.mouse.up()
        zoomed: list[float] = self.page.evaluate(RANGE)
        return zoomed if zoomed and zoomed[0] > 1 else None

    def step(self) -> int:
        """The number on the tile."""
        text = self.page.locator(STEP).first.inner_text()
        return int(text.replace(",", "")) if text.replace(",", "").isdigit() else -1


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    run = start(
        tmp_path_factory.mktemp("live"), "two", faults=unhurried(2, seconds=0.25),
        settings=["train.steps=100000", "checkpoint.interval=100"],
    )  # fmt: skip
    try:
        wait_for(lambda: run.run.stores(), "the store", run)
        with DashboardServer(run.runs_dir, port=0) as server, playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=browser_path(), args=BROWSER)
            found = Visit(browser.new_page(viewport={"width": 1280, "height": 1000}), server.url, run)
            found.page.set_default_timeout(LONGEST_MS)
            found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
            found.page.on("console", lambda message: found.hear(message))
            yield found
            browser.close()
    finally:
        run.kill_all()
        if run.process.stdout is not None:
            run.process.stdout.close()


def test_the_steps_move_and_the_zoom_stays(visit: Visit) -> None:
    visit.open("overview")
    first: int = wait_for(lambda: visit.step() if visit.step() > 0 else 0, "a step on the tile")
    visit.page.get_by_text(re.compile(r"\btraining$")).first.wait_for(timeout=LONGEST_MS)  # behind its icon
    visit.page.wait_for_selector(".st-key-overview-lines .nsewdrag", timeout=LONGEST_MS)
    zoomed: list[float] = wait_for(visit.zoom, "a zoom by the mouse")  # a chart that is replaced just then has none
    drawn = visit.page.evaluate(LAST_DRAWN)
    second: int = wait_for(lambda: visit.step() if visit.step() > first else 0, "a later step")
    wait_for(lambda: visit.step() > second, "a step later still")
    wait_for(lambda: visit.page.evaluate(LAST_DRAWN) > drawn, "a longer line in the chart")
    wait_for(lambda: visit.page.evaluate(RANGE) == pytest.approx(zoomed), "the zoom in the longer chart")
    visit.page.wait_for_url("**zoom-overview-loss=**", timeout=LONGEST_MS)
    visit.page.reload()  # a session of its own, which knows the address only
    visit.page.wait_for_selector(".st-key-overview-lines .nsewdrag", timeout=LONGEST_MS)
    wait_for(lambda: visit.page.evaluate(RANGE) == pytest.approx(zoomed), "the same zoom in a new session")
    visit.page.go_back()
    wait_for(lambda: max(visit.page.evaluate(RANGE)[:1], default=2) <= 1, "the whole line after Back")
    assert "zoom" not in visit.page.url
    assert not visit.complaints


WATCHED = usually(PAGES, later=PAGES.keys() - {"timeline"})
"""Every page is computed in tests/dashboard/test_*_page.py, without a browser; three are visited by the other tests."""


@pytest.mark.parametrize("name", WATCHED)
def test_no_page_of_a_live_run_complains(visit: Visit, name: str) -> None:
    visit.open(name)
    visit.page.wait_for_selector(COMPUTED, state="detached", timeout=LONGEST_MS)
    something = f"{SHOWN}, :text('{EMPTY[name]}')" if name in EMPTY else SHOWN
    try:
        visit.page.wait_for_selector(f"{something}, {FAILED}", timeout=LONGEST_MS)
    except playwright.TimeoutError:
        raise AssertionError(f"nothing on it: {visit.page.inner_text('body')[-1500:]}") from None
    assert visit.page.locator(FAILED).count() == 0
    visit.page.wait_for_selector(something, timeout=LONGEST_MS)  # it may be being replaced just now
    assert not visit.complaints


def test_a_click_on_a_cell_is_an_address_that_shows_the_same_elsewhere_and_back_leads_back(visit: Visit) -> None:
    visit.open("overview")
    visit.open("ranks")
    visit.page.wait_for_selector(".js-plotly-plot .nsewdrag", timeout=LONGEST_MS)
    wait_for(lambda: _clicked_cell(visit), "what a click on a cell opens")  # a chart replaced just then has none
    assert re.search(r"rank=0&step=\d+", visit.page.url), visit.page.url
    context = visit.page.context.browser.new_context(viewport={"width": 800, "height": 1000})  # type: ignore[union-attr]
    page = context.new_page()
    page.set_default_timeout(LONGEST_MS)
    page.goto(visit.page.url)
    page.wait_for_selector("text=/Rank 0 in step/", timeout=LONGEST_MS)
    context.close()
    assert "Ranks" in visit.page.title()
    visit.page.locator(".st-key-to-timeline a").click()
    visit.page.wait_for_url("**/timeline?**", timeout=LONGEST_MS)
    visit.page.go_back()
    visit.page.wait_for_selector("text=/Rank 0 in step/", timeout=LONGEST_MS)
    assert not visit.complaints


def _clicked_cell(visit: Visit) -> bool:
    """Click on a cell of rank 0; return whether its panel came."""
    box = visit.box(".js-plotly-plot .nsewdrag")
    visit.page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 0.25 * box["height"])
    try:
        visit.page.wait_for_selector("text=/Rank 0 in step/", timeout=CLICKED_MS)
    except playwright.TimeoutError:
        return False
    return True


def test_back_leads_from_an_opened_run_to_the_filtered_table(visit: Visit) -> None:
    """It led to an address of the table with the run's name, which showed the Overview again."""
    page, run_id = visit.page, visit.run.run.run_id
    page.goto(f"{visit.url}/?filter={run_id}")
    page.wait_for_selector("[data-testid=stDataFrame] canvas", timeout=LONGEST_MS)

    def is_selected() -> bool:
        box = visit.box("[data-testid=stDataFrame] canvas")
        page.mouse.click(box["x"] + 15, box["y"] + 52)  # the first row, below the header
        with contextlib.suppress(playwright.TimeoutError):
            page.wait_for_selector(f".st-key-open-run a[href*='{run_id}']", timeout=CLICKED_MS)
            return True
        return False

    wait_for(is_selected, "the link of the selected row")
    page.locator(".st-key-open-run a").click()
    page.wait_for_selector("h1:has-text('Overview')", timeout=LONGEST_MS)
    page.wait_for_url("**/overview?run=*", timeout=LONGEST_MS)
    page.go_back()
    page.wait_for_selector("h1:has-text('Runs')", timeout=LONGEST_MS)
    assert page.locator("input[aria-label=Filter]").input_value() == run_id
    assert not visit.complaints


def test_a_chart_whose_library_does_not_load_says_so_and_is_drawn_when_it_does(visit: Visit) -> None:
    context = visit.page.context.browser.new_context(viewport={"width": 1280, "height": 1000})  # type: ignore[union-attr]
    page = context.new_page()
    page.set_default_timeout(LONGEST_MS)
    context.route("**/plotly.min.js", lambda route: route.abort())
    page.goto(f"{visit.url}/{PAGES['overview']}")
    page.wait_for_selector("text=This chart could not be drawn: plotly.js did not load", timeout=LONGEST_MS)
    assert page.locator(".js-plotly-plot").count() == 0
    context.unroute("**/plotly.min.js")
    page.wait_for_selector(".js-plotly-plot .main-svg", timeout=LONGEST_MS)  # it asks again by itself
    context.close()


def test_the_page_of_a_run_that_is_deleted_says_so(visit: Visit, tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=12)
    placed = Path(shutil.copytree(run.path, visit.run.runs_dir / run.run_id))
    context = visit.page.context.browser.new_context(viewport={"width": 1280, "height": 1000})  # type: ignore[union-attr]
    page = context.new_page()
    page.set_default_timeout(LONGEST_MS)
    try:
        page.goto(f"{visit.url}/{PAGES['findings']}?run={run.run_id}")
        page.wait_for_selector("text=No problems found", timeout=LONGEST_MS)
        page.wait_for_selector(SETTLED, timeout=LONGEST_MS)
    finally:
        placed.rename(tmp_path / "removed")  # at once, so that the page finds no half of it
    told = page.wait_for_selector("text=/The address names|no record yet/", timeout=LONGEST_MS)
    assert told is not None
    assert f"{run.run_id}, which is not in" in told.inner_text()
    context.close()


def test_a_fault_of_this_moment_is_a_finding(visit: Visit) -> None:
    visit.open("overview")
    assert visit.page.get_by_text("Rank lost").count() == 0
    kill(visit.run.pids()[1], signal.SIGKILL)
    visit.page.wait_for_selector("text=Rank lost", timeout=LONGEST_MS)
    card = visit.page.locator("[class*=st-key-card-]", has_text="Rank lost").first
    card.get_by_role("link", name="Evidence").first.click()
    visit.page.wait_for_url("**finding=rank_lost*", timeout=LONGEST_MS)
    visit.page.wait_for_selector("text=Runbook", timeout=LONGEST_MS)
    assert visit.page.locator("[data-testid=stException]").count() == 0
    assert not visit.complaints
