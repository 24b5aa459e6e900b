"""Take screenshots of every page, in light and dark, for a wide and a narrow screen.

    python -m dashboard.screenshots runs/latest --out docs/images
    python -m dashboard.screenshots runs/latest --pages overview,ranks --themes dark --widths desktop

It starts the dashboard on a free port and opens each page in a headless Chromium, from the system
(`apt-get install chromium`), through playwright. Pictures are reduced to 128 colours to be small.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from dashboard.launch import DashboardError, DashboardServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["PAGES", "PENDING", "SETTLED", "browser_path", "main", "wait_until_whole"]

PAGES = {
    "home": "", "overview": "overview", "findings": "findings", "goodput": "goodput", "ranks": "ranks",
    "timeline": "timeline",
    "collectives": "collectives", "pipeline": "pipeline", "numerics": "numerics", "memory": "memory",
    "health": "health", "recovery": "recovery", "logs": "logs", "events": "events",
    "configuration": "configuration", "system": "system", "compare": "compare-runs", "sql": "sql", "fleet": "fleet",
}  # fmt: skip
"""{name of the picture: path of the page}."""
WIDTHS = {"desktop": 1440, "laptop": 1280, "tablet": 800, "narrow": 390}
COLLAPSES_PX = 768
"""Width up to which the sidebar is collapsed."""
MAX_HEIGHT = 3_200
COLOURS = 128
SETTLED = '[data-testid="stApp"][data-test-script-state="notRunning"]'
"""Selector that matches when the page's script has ended."""
PENDING = "[data-testid=stCaptionContainer]:has-text('Loading more')"
"""Selector of the caption that a page shows while a part of it is computed."""
_UNDRAWN = "[data-testid=stSkeleton], .rankscope-chart:not(:has(.main-svg))"
"""Selector of elements that still wait for their script. Loading the script takes seconds on a busy machine."""
_IS_WHOLE = """([settled, pending, undrawn]) => document.querySelector(settled) !== null &&
  document.querySelector(undrawn) === null &&
  ![...document.querySelectorAll(pending)].some(caption => caption.innerText.includes('Loading more'))"""


def browser_path() -> str | None:
    """Path of the system's Chromium, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def take(url: str, out: Path, *, pages: list[str], themes: list[str], widths: list[str], run: str) -> Iterator[Path]:
    """Write one picture per page, theme and width; yields the paths."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for theme in themes:
            for width in widths:
                context = browser.new_context(
                    viewport={"width": WIDTHS[width], "height": 900},
                    color_scheme=theme,  # type: ignore[arg-type]
                )
                page = context.new_page()
                page.set_default_timeout(120_000)  # a busy machine starts the server slowly
                for name in pages:
                    address = PAGES[name] if name != "home" else PAGES["overview"]
                    page.goto(f"{url}/{address}?{urlencode({'run': run})}")
                    if name == "home":  # the server may have been started on one run, which the bare address shows
                        if WIDTHS[width] <= COLLAPSES_PX:
                            page.locator("[data-testid=stExpandSidebarButton]").click()
                        page.get_by_role("link", name="Runs", exact=True).click()
                        page.get_by_role("heading", name="Runs", exact=True).wait_for()
                        page.mouse.move(WIDTHS[width] / 2, 2)  # leave the link, which would look selected
                    path = out / f"{name}-{theme}-{width}.png"
                    path.write_bytes(small(_picture(page, WIDTHS[width])))
                    yield path
                context.close()
        browser.close()


def _picture(page: Page, width: int) -> bytes:
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_selector("h1")
    wait_until_whole(page, timeout_ms=120_000)
    page.wait_for_timeout(800)  # charts are drawn after their data have arrived
    height = page.evaluate("document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight")
    page.set_viewport_size({"width": width, "height": int(min(MAX_HEIGHT, max(600, height + 24)))})
    page.wait_for_timeout(1_500)
    return page.screenshot()


def wait_until_whole(page: Page, *, timeout_ms: float) -> None:
    """Wait until the page's script has ended with nothing left to compute, and every element is drawn.

    A missing caption alone proves nothing, because there is none between two runs of the script either.
    """
    caption = PENDING.partition(":")[0]
    page.wait_for_function(_IS_WHOLE, arg=[SETTLED, caption, _UNDRAWN], timeout=timeout_ms)


def small(png: bytes) -> bytes:
    """Reduce the colours of a PNG."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    packed = io.BytesIO()
    picture.save(packed, format="PNG", optimize=True)
    return packed.getvalue()


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns 0, or 2 after a usage error."""
    parser = argparse.ArgumentParser(
        prog="python -m dashboard.screenshots", description="Take screenshots of every page."
    )
    parser.add_argument("runs", type=Path, help="a run, or a folder of runs")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--pages", default=",".join(PAGES))
    parser.add_argument("--themes", default="light,dark")
    parser.add_argument("--widths", default="desktop,narrow")
    options: Any = parser.parse_args(arguments)
    if browser_path() is None:
        sys.stderr.write("chromium is not installed: apt-get install chromium\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with DashboardServer(options.runs, port=0) as server:
            for path in take(
                server.url, options.out, pages=options.pages.split(","), themes=options.themes.split(","),
                widths=options.widths.split(","), run=options.runs.resolve().name,
            ):  # fmt: skip
                sys.stdout.write(f"{path}  {path.stat().st_size / 1000:.0f} kB\n")
                sys.stdout.flush()
    except DashboardError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
