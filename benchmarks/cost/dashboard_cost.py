"""CPU that each page of the dashboard costs its server on a huge run: what can be measured beside other work.

    python -m benchmarks.cost.dashboard_cost runs/huge  # a run that is there (`benchmarks.scale.dashboard`)
    python -m benchmarks.cost.dashboard_cost runs/huge --pages overview,ranks

The pages run in this process as Streamlit's AppTest runs them, without a browser. All threads count, DuckDB's too, so
on two cores that nobody else uses the time on the wall is between a half of it and the whole. The analyzers' diagnosis,
which runs beside the pages, is left out: `benchmarks.scale.ranks` measures it.

| column | CPU |
|---|---|
| drawn | until the page stands, with a sentence where a part takes longer |
| whole | until every part of it is there; nothing was computed before |
| refresh | of the page once more, as at each poll, with the store unchanged |
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

import dashboard
from benchmarks.harness import argument_parser
from dashboard.data import prefetch
from dashboard.data.background_answers import Answer
from dashboard.data.run_access import RunAccess
from dashboard.screenshots import PAGES

COMING = ("Computing", "So far every")
REFRESHES = 3


def open_page(run: Path, name: str) -> AppTest:
    """The page after its first run."""
    os.environ["RANKSCOPE_DASHBOARD_RUNS"] = str(run.parent)
    app = AppTest.from_file(Path(dashboard.__file__).parent / "app.py", default_timeout=600)
    if PAGES[name]:
        app._page_hash = calc_hash(PAGES[name])
    app.query_params["run"] = run.name
    return app.run()


def is_whole(app: AppTest) -> bool:
    """Return True if no part of the page is still being computed."""
    texts = [str(element.value) for kind in ("markdown", "caption") for element in app.get(kind)]
    return not any(words in text for words in COMING for text in texts)


def cost(run: Path, name: str) -> tuple[float, float, float]:
    """Seconds of CPU: drawn, whole, a refresh."""
    begun = time.process_time()
    app = open_page(run, name)
    drawn_s = time.process_time() - begun
    while not is_whole(app):
        app.run()
    whole_s = time.process_time() - begun
    begun = time.process_time()
    for _ in range(REFRESHES):
        app.run()
    return drawn_s, whole_s, (time.process_time() - begun) / REFRESHES


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--pages", default=",".join(name for name in PAGES if name not in ("findings", "goodput")))
    options: Any = parser.parse_args(arguments)
    prefetch.LARGE_BYTES = 1 << 60  # nothing is looked at ahead: each page pays for itself
    RunAccess.diagnosis = lambda self, **_: Answer(is_fresh=True)  # type: ignore[method-assign]
    run = options.run.resolve()
    cost(run, "sql")  # what is imported once
    for name in options.pages.split(","):
        drawn_s, whole_s, refresh_s = cost(run, name)
        text = f"{name:12} drawn {drawn_s:5.2f} s   whole {whole_s:5.2f} s   refresh {1e3 * refresh_s:4.0f} ms"
        print(text, flush=True)
    print(f"largest memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
