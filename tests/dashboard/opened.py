"""Pages of the dashboard as AppTest runs them: the script of the real app on a folder of runs, without a browser.

app = open_page(runs, "ranks", run=run.run_id)
assert not app.exception
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from streamlit.components.v2.component_manager import BidiComponentManager
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

import dashboard
from dashboard.screenshots import PAGES

__all__ = ["PAGES", "charts", "open_page", "shown"]

APP = Path(dashboard.__file__).parent / "app.py"
UNFINISHED = ("Loading more…", "Reading the run…", "Computing from the records…", "Computing the account…")
"""What stands on a page for a part that is still being computed."""
WHOLE_S = 60.0
"""Time that a page gets to be whole; it is returned as it is then."""


def open_page(
    runs: Path, page: str = "overview", *, run: str = "", until_whole: bool = True, **address: str | list[str]
) -> AppTest:
    """The page, with `?run=...` and other parts of the address; once it is whole, or after its first run.

    A crowded machine computes some parts for longer than a page waits for them: it is drawn again, as by its poll.
    """
    os.environ["RANKSCOPE_DASHBOARD_RUNS"] = str(runs)  # conftest takes it away again
    app = AppTest.from_file(APP, default_timeout=100)
    app._bidi_component_manager = _components()
    if PAGES[page]:
        app._page_hash = calc_hash(PAGES[page])
    if run:
        app.query_params["run"] = run
    for name, value in address.items():
        app.query_params[name] = value
    app.run()
    deadline = time.monotonic() + WHOLE_S
    while until_whole and any(text in shown(app) for text in UNFINISHED) and time.monotonic() < deadline:
        app.run()  # waits for what is computed
    return app


@functools.cache
def _components() -> BidiComponentManager:
    """Components of the installed packages: each page would search all of them again, which takes most of its time."""
    manager = BidiComponentManager()
    manager.discover_and_register_components(start_file_watching=False)
    return manager


def charts(app: AppTest) -> list[Any]:
    """The charts of the page, without the elements that load their library and close the menu."""
    scripts = ("library", "menu-closing-script")
    return [element for element in app.get("bidi_component") if element.key not in scripts]


def shown(app: AppTest) -> str:
    """All text of the page that a reader sees, one element a line."""
    parts: list[str] = []
    for kind in ("title", "subheader", "markdown", "caption", "text", "code", "warning"):
        parts += [str(element.value) for element in app.get(kind) if hasattr(element, "value")]
    parts += [f"{metric.label}: {metric.value}" for metric in app.metric]
    return "\n".join(parts)
