"""The page in a real browser: everything drawn, a silent console, nothing of the run obeyed, no sideways scrolling."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from probes.tape.rundir import RunDir
from tests.analyzers.report.hostile import hostile_run
from tests.analyzers.report.test_files import html_of
from tests.factories import make_run

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
# What the page itself does not say of itself; added to a copy.
PROBE = b"""<script>setInterval(() => {
  const root = document.documentElement;
  root.dataset.owned = String(window.owned);
  root.dataset.overflow = String(root.scrollWidth > root.clientWidth);
  root.dataset.empty = String([...document.querySelectorAll(".figure:not([hidden])")]
    .filter((place) => !place.querySelector("svg.main-svg")).length);
  if (!root.dataset.ready || root.dataset.covered) return;  // once: it costs a layout
  root.dataset.covered = String([...document.querySelectorAll(".figure:not([hidden])")].filter((place) => {
    const legend = place.querySelector("g.legend")?.getBoundingClientRect();
    return legend && [...place.querySelectorAll("g.draglayer rect.nsewdrag")].some((plot) =>
      legend.bottom > plot.getBoundingClientRect().top + 2 && legend.top < plot.getBoundingClientRect().bottom - 2);
  }).length);
  root.dataset.cut = String([...document.querySelectorAll(".tile b")]
    .filter((tile) => tile.scrollWidth > tile.clientWidth).length);
}, 50)</script></body>"""

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine")


def opened(run: RunDir, folder: Path, *options: str, width: int = 1400) -> tuple[dict[str, str], list[str], bytes]:
    """(data attributes of the document, lines on the console, the page)."""
    page, _ = html_of(run)
    (folder / "page.html").write_bytes(page.replace(b"</body>", PROBE))
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},1000", "--virtual-time-budget=20000",
            *options, "--dump-dom", f"file://{folder / 'page.html'}",
        ],
        capture_output=True, text=True, timeout=100, check=True, errors="replace",
    )  # fmt: skip
    head = re.search(r"<html[^>]*>", done.stdout)
    assert head is not None, done.stdout[:500]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return dict(re.findall(r'data-(\w+)="([^"]*)"', head[0])), console, page


def test_every_figure_is_drawn_and_the_console_stays_silent(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=60, slow={2: 1.6}, nan={1: 20})
    seen, console, page = opened(run, tmp_path)
    shown = len(re.findall(rb'data-figure="[^"]+"[^>]*aria-label="[^"]*" style', page))
    assert seen | {"drawn": str(shown)} == seen, "some figures were not drawn"
    assert shown >= 7
    assert (seen["ready"], seen["empty"], seen["overflow"]) == ("yes", "0", "false")
    assert (seen["covered"], seen["cut"]) == ("0", "0")
    assert console == []


def test_a_hostile_run_does_nothing_in_a_browser_dark_and_narrow(tmp_path: Path) -> None:
    dark = "--blink-settings=preferredColorScheme=0"
    seen, console, _ = opened(hostile_run(tmp_path), tmp_path, "--force-dark-mode", dark, width=420)
    assert (seen["owned"], seen["ready"], seen["empty"], seen["overflow"]) == ("undefined", "yes", "0", "false")
    assert console == []
