"""How long the dashboard's pages take on a huge run, and what an hour of refreshes costs in memory.

    python -m benchmarks.dashboard                                  # 1,024 ranks x 100,000 steps; 10 minutes, 10 GB
    python -m benchmarks.dashboard --ranks 64 --steps 10000 --refreshes 30

The run is a store of finished steps (`benchmarks.scale`), opened in a real Chromium. Measured for each page: from the
click on its link to the last element drawn, the first time (nothing of the page was computed before), and a refresh of
the page that is open; the goals are 1 s and 300 ms. Then the overview is drawn `--refreshes` times, and the server's
memory is looked at. The browser runs on the same cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.scale import make_steps
from dashboard.launch import DashboardServer
from dashboard.screenshots import PAGES, PENDING, SETTLED, browser_path
from probes.rundir import RunDir

if TYPE_CHECKING:
    from playwright.sync_api import Page

TITLES = {
    "health": "GPU and host health", "recovery": "Checkpoints and recovery", "compare": "Compare runs", "sql": "SQL",
}  # fmt: skip
_WATCH = """() => { window.drawnAgain = new Promise(done => {
  const app = document.querySelector('[data-testid=stApp]'), begun = performance.now(); let seen = false;
  new MutationObserver((_, watcher) => {
    const state = app.getAttribute('data-test-script-state');
    if (state !== 'notRunning') seen = true;
    else if (seen) { watcher.disconnect(); requestAnimationFrame(() => done(performance.now() - begun)); }
  }).observe(app, {attributes: true}); }); }"""


def click(page: Page, name: str) -> float:
    """Seconds from the click on a page's link to the page drawn, with everything that it asked for."""
    begun = time.perf_counter()
    path = PAGES[name]
    page.click(f"[data-testid=stSidebarNavLink][href$='/{path}']")
    page.wait_for_selector(f"h1:has-text('{TITLES.get(name, name.capitalize())}')", timeout=120_000)
    page.wait_for_selector(SETTLED, timeout=300_000)
    drawn = time.perf_counter() - begun
    if page.locator(PENDING).count():
        page.wait_for_selector(PENDING, state="detached", timeout=600_000)
        page.wait_for_selector(SETTLED, timeout=60_000)
    return drawn


def refresh(page: Page) -> float:
    """Seconds from asking for the page's script again (its hot key) to its end; the page stays, as at each poll."""
    page.evaluate(_WATCH)
    page.keyboard.press("r")
    return float(page.evaluate("window.drawnAgain")) / 1e3


def memory_mib(server: DashboardServer) -> float:
    """Resident memory of the server's process."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--refreshes", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options: Any = parser.parse_args(arguments)
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="rankscope-dashboard-") as folder:
        begun = time.perf_counter()
        path = Path(folder) / "runs" / "huge"
        make_steps(path, options.ranks, options.steps)
        size = sum(store.stat().st_size for store in RunDir.open(path).stores())
        took_s = time.perf_counter() - begun
        print(f"{options.ranks} ranks x {options.steps} steps: {size / 1e9:.2f} GB, made in {took_s:.0f} s", flush=True)
        with DashboardServer(path, port=0) as server, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1440, "height": 1000})
            begun = time.perf_counter()
            page.goto(f"{server.url}/sql")
            page.wait_for_selector("h1", timeout=120_000)
            page.wait_for_selector(SETTLED, timeout=120_000)
            print(f"browser and scripts loaded in {time.perf_counter() - begun:.1f} s")
            rows = {name: {"first_s": click(page, name)} for name in PAGES}
            for name, row in rows.items():
                click(page, name)
                row["refresh_s"] = statistics.median(refresh(page) for _ in range(5))
                print(
                    f"{name:12}  first {row['first_s']:6.2f} s   refresh {1e3 * row['refresh_s']:5.0f} ms", flush=True
                )
            before = memory_mib(server)
            others = ("overview", "ranks", "memory")
            for number in range(options.refreshes):
                click(page, others[number % len(others)])
            after = memory_mib(server)
            print(f"memory of the server: {before:.0f} MiB, after {options.refreshes} more pages {after:.0f} MiB")
            browser.close()
    if options.json:
        found = {"pages": rows, "memory_mib": [before, after], "ranks": options.ranks, "steps": options.steps}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
