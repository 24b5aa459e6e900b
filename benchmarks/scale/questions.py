"""Five questions about runs of 4, 256 and 1,024 ranks: clicks, seconds and CPU until the dashboard answers, and its
shared address.

    python -m benchmarks.scale.questions                                # 4, 256 and 1,024 ranks x 2,000 steps
    python -m benchmarks.scale.questions --ranks 1024 --steps 100000    # makes 4 GB
    python -m benchmarks.scale.questions --keep /tmp/questions             # keeps the runs for the next time

One rank is 5 % slow from the middle on, and the loss of one step is doubled (`benchmarks.scale.full_run`); the run is
compared with one that has a tenth of its ranks. Each run gets a new server, and each question a new Chromium page that
opens the run's Overview. The server has no verdict before the first question, so the first row includes all computation
from a started dashboard to the answer.

| column | meaning |
|---|---|
| clicks | from the run's Overview to the answer |
| first | seconds from opening the address of the Overview to its first paint |
| answer | seconds from there, including the clicks, until the page shows the complete answer |
| CPU | CPU seconds of the server and its child processes in that time |
| address | seconds until the address, opened in another browser, shows the same answer |
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import argument_parser, write_json
from benchmarks.scale.dashboard import cpu_s
from benchmarks.scale.full_run import make_full_run
from dashboard.launch import DashboardServer
from dashboard.screenshots import browser_path
from store.database import connect_writer
from tests.dashboard.questions import MAX_CLICKS, Question, evidence_of, menu, read, time_went

LONGEST_MS = 900_000
"""Time limit of an answer."""
COMPARED_PART, FEWEST = 10, 4
"""The other run has a tenth of the steps, and about a tenth of the ranks, as its layout allows."""


def questions(run: str, ranks: int, steps: int) -> tuple[Question, ...]:
    """The questions, and the answers that the generated run has."""
    return (
        Question(
            "which rank is slow, why, since when", run, (evidence_of("Straggler"),),
            (f"text=/Rank {ranks // 3} was slow from step [0-9]+ to the end: .* of compute per step/", "text='Why'"),
        ),
        Question(
            "why did the loss jump", run, (evidence_of("Loss spike"),),
            (f"text=/Loss rose from .* at step {steps * 7 // 10} on batch/", "text='Next'"),
        ),
        time_went(run),
        Question(
            "is the bubble right", run, (menu("Pipeline"),),
            ("[data-testid=stMetric]:has-text('Bubble'):has-text('%')",
             "[data-testid=stMetric]:has-text('Ideal'):has-text('%')"),
        ),
        Question(
            "which of two runs is better and why", run, (menu("Compare runs"),), ("text=/ is (better|faster) than /",),
        ),
    )  # fmt: skip


def ask(browser: Any, server: DashboardServer, question: Question) -> dict[str, Any]:
    """Ask one question on a new page, and open the answer's address on another."""
    with browser.new_context(viewport={"width": 1440, "height": 1000}) as context:
        page, cpu_before, begun = context.new_page(), cpu_s(server, children=True), time.perf_counter()
        page.goto(f"{server.url}/overview?run={question.run}", timeout=LONGEST_MS)
        page.locator("h1:has-text('Overview')").wait_for(timeout=LONGEST_MS)
        first_s = time.perf_counter() - begun
        for selector in question.clicks:
            page.locator(selector).first.click(timeout=LONGEST_MS)
        read(page, question, LONGEST_MS)
        row = {
            "question": question.text, "clicks": len(question.clicks), "first_s": first_s,
            "answer_s": time.perf_counter() - begun, "cpu_s": cpu_s(server, children=True) - cpu_before,
        }  # fmt: skip
        address = page.url
    with browser.new_context(viewport={"width": 1440, "height": 1000}) as context:
        page, begun = context.new_page(), time.perf_counter()
        page.goto(address, timeout=LONGEST_MS)
        read(page, question, LONGEST_MS)
        return row | {"address_s": time.perf_counter() - begun}


def make(folder: Path, ranks: int, steps: int) -> Path:
    """Make the run, and the other run, which processes half the tokens in equally long steps."""
    fewer = max(FEWEST, ranks // COMPARED_PART // 32 * 32)
    before = make_full_run(folder / "before", fewer, max(100, steps // COMPARED_PART))
    connection = connect_writer(before.store(), wait_s=10, threads=2)
    connection.execute("UPDATE steps_done SET tokens = tokens // 2")
    connection.close()
    return make_full_run(folder / f"ranks-{ranks}", ranks, steps).path


def main(arguments: list[str] | None = None) -> int:
    from playwright.sync_api import sync_playwright

    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 256, 1024])
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--keep", type=Path, help="folder in which runs are kept and reused")
    options: Any = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    print("| ranks | question | clicks | first s | answer s | CPU s | address s |\n|---|---|---|---|---|---|---|")
    with ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-questions-")))
        driver = stack.enter_context(sync_playwright())
        browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        stack.callback(browser.close)
        for ranks in options.ranks:
            run = root / f"{ranks}x{options.steps}" / f"ranks-{ranks}"
            if not run.exists():
                make(run.parent, ranks, options.steps)
            with DashboardServer(run, port=0) as server:
                for question in questions(run.name, ranks, options.steps):
                    row = {"ranks": ranks} | ask(browser, server, question)
                    rows.append(row)
                    print(
                        f"| {ranks:,} | {row['question']} | {row['clicks']} | {row['first_s']:.2f} | "
                        f"{row['answer_s']:.1f} | {row['cpu_s']:.2f} | {row['address_s']:.1f} |", flush=True,
                    )  # fmt: skip
            if not options.keep:
                shutil.rmtree(run.parent)
    write_json(options.json, {"steps": options.steps, "questions": rows})
    return 0 if all(row["clicks"] <= MAX_CLICKS for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
