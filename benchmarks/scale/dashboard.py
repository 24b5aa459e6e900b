"""Time of the dashboard's pages on a huge run, and memory over an hour of refreshes.

    python -m benchmarks.scale.dashboard  # 1,024 ranks x 100,000 steps: 4 GB, some minutes
    python -m benchmarks.scale.dashboard --ranks 64 --steps 10000 --refreshes 100
    python -m benchmarks.scale.dashboard --run runs/huge --refreshes 0    # an existing run
    python -m benchmarks.scale.dashboard --no-pages --refreshes 0         # only the table of 500 runs

The run has data on every page (`benchmarks.scale.full_run`) and is opened in a real Chromium. For each page:

| column | time from the click on the page's link, or from the hot key that redraws the page |
|---|---|
| first | until the page is drawn; slow parts still show a message |
| whole | until its last part is drawn; nothing is cached, except what the server has prefetched |
| refresh | until the page is redrawn, as at each poll; median of 5 |
| CPU | the server's CPU seconds for the click, and for a refresh |

The table of a folder with 500 runs is opened in the same way (`--runs`); all have copies of one store. Then an hour of
polls is replayed quickly: three pages are refreshed in rotation, the store grows by one step of every rank before each
refresh, and the server's memory is measured. The browser runs on the same cores.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import argument_parser, write_json
from benchmarks.scale.full_run import make_full_run
from dashboard.frame import POLL_S
from dashboard.launch import DashboardServer
from dashboard.screenshots import PAGES, PENDING, SETTLED, browser_path, wait_until_whole
from probes.tape.rundir import RunDir
from store.database import connect_writer

if TYPE_CHECKING:
    from playwright.sync_api import Page

LINKS = {"home": "Runs", "compare": "Compare runs", "sql": "SQL"}
"""Names of menu links that are not the capitalised page name."""
HOUR = int(3600 / POLL_S)
"""Number of refreshes of a page that stays open for an hour."""
COMPARED_RANKS = 64
"""Ranks of the run with which the huge one is compared; it has a tenth of the steps."""
LISTED_RANKS, LISTED_STEPS = 32, 200
"""Size of each run in the table."""
HOUR_RANKS, HOUR_STEPS = 64, 2_000
"""Size of the run that grows for an hour."""
HOUR_PAGES = ("overview", "ranks", "memory")
_WATCH = """() => { window.drawnAgain = new Promise(done => {
  const app = document.querySelector('[data-testid=stApp]'), begun = performance.now(); let seen = false;
  new MutationObserver((_, watcher) => {
    const state = app.getAttribute('data-test-script-state');
    if (state !== 'notRunning') seen = true;
    else if (seen) { watcher.disconnect(); requestAnimationFrame(() => done(performance.now() - begun)); }
  }).observe(app, {attributes: true}); }); }"""


def click(page: Page, name: str) -> tuple[float, float]:
    """Seconds from the click on a page's link until the page is drawn, and until its last query is answered."""
    begun = time.perf_counter()
    page.locator(".st-key-menu").get_by_role("link", name=LINKS.get(name, name.capitalize()), exact=True).click()
    page.wait_for_selector(f"h1:has-text('{LINKS.get(name, name.capitalize())}')", timeout=120_000)
    page.wait_for_selector(f"{SETTLED}, {PENDING}", timeout=300_000, state="attached")
    drawn_s = time.perf_counter() - begun
    wait_until_whole(page, timeout_ms=600_000)
    return drawn_s, time.perf_counter() - begun


def refresh(page: Page) -> float:
    """Seconds for a rerun of the page's script (by its hot key); the page stays, as at each poll."""
    page.evaluate(_WATCH)
    page.keyboard.press("r")
    return float(page.evaluate("window.drawnAgain")) / 1e3


def memory_mib(server: DashboardServer) -> float:
    """Resident memory of the server's process."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def cpu_s(server: DashboardServer, *, children: bool = False) -> float:
    """CPU seconds of the server's process; with `children`, including its ended child processes."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")


def time_pages(page: Page, server: DashboardServer) -> dict[str, dict[str, float]]:
    """Click every page once, then redraw every page five times."""
    rows: dict[str, dict[str, float]] = {}
    for name in PAGES:
        before = cpu_s(server)
        first_s, whole_s = click(page, name)
        rows[name] = {"first_s": first_s, "whole_s": whole_s, "first_cpu_s": cpu_s(server) - before}
    for name, row in rows.items():
        click(page, name)
        before = cpu_s(server)
        row["refresh_s"] = statistics.median(refresh(page) for _ in range(5))
        row["refresh_cpu_s"] = (cpu_s(server) - before) / 5
        show(name, row)
    return rows


def show(name: str, row: dict[str, float]) -> None:
    """Print a row of the table."""
    print(
        f"{name:12} first {row['first_s']:6.2f} s  whole {row['whole_s']:6.2f} s  CPU {row['first_cpu_s']:5.2f} s"
        f"  refresh {1e3 * row['refresh_s']:5.0f} ms  CPU {1e3 * row['refresh_cpu_s']:5.0f} ms", flush=True,
    )  # fmt: skip


def go_through_an_hour(page: Page, server: DashboardServer, run: RunDir, refreshes: int) -> list[float]:
    """Memory (MiB) before the refreshes of a growing run, and after each twelfth of them."""
    found = [memory_mib(server)]
    for number in range(refreshes):
        if number % max(1, refreshes // len(HOUR_PAGES)) == 0:
            click(page, HOUR_PAGES[number * len(HOUR_PAGES) // refreshes])
        add_a_step(run)
        refresh(page)
        if (number + 1) % max(1, refreshes // 12) == 0:
            found.append(memory_mib(server))
            print(f"{number + 1:6} refreshes: {found[-1]:.0f} MiB", flush=True)
    return found


def add_a_step(run: RunDir) -> None:
    """Append a copy of every rank's newest step as the next step."""
    connection = connect_writer(run.store(), wait_s=30, threads=1)
    try:
        connection.execute(
            "INSERT INTO steps_done SELECT * REPLACE (step + 1 AS step, start_ns + duration_ns AS start_ns) "
            "FROM steps_done WHERE step = (SELECT max(step) FROM steps_done)"
        )
    finally:
        connection.close()


def make_many(folder: Path, num_runs: int) -> Path:
    """Make a folder of finished runs with different names; their stores are links to one file."""
    first = make_full_run(folder / "run-0000", LISTED_RANKS, LISTED_STEPS)
    for number in range(1, num_runs):
        path = folder / f"run-{number:04}"
        shutil.copytree(first.path, path, copy_function=os.link)
        manifest = path / "run.json"
        text = json.dumps(json.loads(manifest.read_text()) | {"run_id": path.name})
        manifest.unlink()
        manifest.write_text(text)
    return folder


def time_table(folder: Path) -> dict[str, float]:
    """Times of the table of runs: first, whole, and a refresh."""
    with ExitStack() as stack:
        page, server = open_page(stack, folder / "run-0000")
        before = cpu_s(server)
        first_s, whole_s = click(page, "home")
        row = {"first_s": first_s, "whole_s": whole_s, "first_cpu_s": cpu_s(server) - before}
        last = -1.0
        while cpu_s(server) - last > 0.2:  # the summaries of the runs are read in the background
            last = cpu_s(server)
            page.wait_for_timeout(1_000)
        before = cpu_s(server)
        row["refresh_s"] = statistics.median(refresh(page) for _ in range(5))
        row["refresh_cpu_s"] = (cpu_s(server) - before) / 5
    return row


def open_page(stack: ExitStack, run: Path) -> tuple[Page, DashboardServer]:
    """Start a server, and a browser with loaded scripts on a page without queries."""
    from playwright.sync_api import sync_playwright

    server = stack.enter_context(DashboardServer(run, port=0))
    driver = stack.enter_context(sync_playwright())
    browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
    stack.callback(browser.close)
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    begun = time.perf_counter()
    page.goto(f"{server.url}/sql")
    page.wait_for_selector("h1", timeout=120_000)
    page.wait_for_selector(SETTLED, timeout=120_000)
    print(f"browser and scripts loaded in {time.perf_counter() - begun:.1f} s")
    return page, server


def made(path: Path, ranks: int, steps: int) -> RunDir:
    """Make a run of finished steps."""
    begun = time.perf_counter()
    run = make_full_run(path, ranks, steps)
    size = run.store().stat().st_size
    print(
        f"{ranks} ranks x {steps} steps: {size / 1e9:.2f} GB, made in {time.perf_counter() - begun:.0f} s", flush=True
    )
    return run


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--run", type=Path, help="an existing run; default: make one")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=500, help="runs in the table; 0: no table")
    parser.add_argument("--refreshes", type=int, default=HOUR, help="refreshes in the simulated hour; 0: skip it")
    parser.add_argument("--no-pages", action="store_true", help="skip the huge run's pages")
    options: Any = parser.parse_args(arguments)
    found: dict[str, Any] = {"ranks": options.ranks, "steps": options.steps, "refreshes": options.refreshes}
    with tempfile.TemporaryDirectory(prefix="rankscope-dashboard-") as folder:
        if not options.no_pages:
            run = options.run or made(Path(folder) / "runs" / "huge", options.ranks, options.steps).path
            if not options.run:
                make_full_run(run.parent / "another", COMPARED_RANKS, options.steps // 10)
            with ExitStack() as stack:
                found["pages"] = time_pages(*open_page(stack, run))
        if options.runs:
            found["table"] = time_table(make_many(Path(folder) / "many", options.runs))
            show(f"{options.runs} runs", found["table"])
        if options.refreshes:
            grown = made(Path(folder) / "grown" / "run", HOUR_RANKS, HOUR_STEPS)
            with ExitStack() as stack:
                found["memory_mib"] = go_through_an_hour(*open_page(stack, grown.path), grown, options.refreshes)
    write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
