"""The server process: it runs Streamlit, and ends when the command that started it ends, even by SIGKILL.

    RANKSCOPE_DASHBOARD_PARENT=4711 python -m dashboard.serve --server.port 8501

A command killed by SIGKILL cannot stop its server, so the kernel does (PR_SET_PDEATHSIG), and the port is freed.
"""

from __future__ import annotations

import ctypes
import inspect
import mimetypes
import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

__all__ = ["end_with", "import_pages"]

APP = Path(__file__).parent / "app.py"
_PR_SET_PDEATHSIG = 1
FOR_THE_PAGES = (
    "dashboard.navigation", "dashboard.login", "dashboard.run_choice", "duckdb", "plotly.io", "plotly.offline",
    "PIL.Image", "streamlit.elements.lib.image_utils", "streamlit.material_icon_names",
)  # fmt: skip
"""Modules that the first page needs, unless Streamlit has already loaded them."""


def end_with(parent: int) -> None:
    """Make the kernel send SIGTERM to this process when its parent ends; exit if the parent has already ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(0)


def import_pages() -> threading.Thread:
    """Do one-time work of the pages in the background: a second for which the first visitor would otherwise wait."""
    thread = threading.Thread(target=_import_all, name="import-pages", daemon=True)
    thread.start()
    return thread


def _import_all() -> None:
    for module in FOR_THE_PAGES:
        import_module(module)
    mimetypes.init()  # for the page's icon
    inspect.getmodule(inspect.currentframe())  # caches the file of each module, which the chart component looks up
    from analyzers.figures.drawing.theme import new_figure

    new_figure().add_scatter(x=[0], y=[0]).to_json()  # Plotly loads its validators with the first figure


def skip_start_check() -> None:
    """Disable Streamlit's check that its own command started it. The check runs at each visitor's first page and looks
    up the file of each loaded module, about 0.2 s of CPU time.
    """
    vars(import_module("streamlit.delta_generator"))["_use_warning_has_been_displayed"] = True


if __name__ == "__main__":
    if sys.platform == "linux":
        end_with(int(os.environ["RANKSCOPE_DASHBOARD_PARENT"]))
    from streamlit.web import cli

    from dashboard.page_base import set_server_root
    from dashboard.request_site import check_every_request

    check_every_request()
    set_server_root()
    skip_start_check()
    import_pages()
    sys.argv = ["streamlit", "run", str(APP), *sys.argv[1:]]
    try:
        cli.main()
    except SystemExit as ended:
        # Exit immediately: Python would wait for queries and diagnoses in threads, minutes for a large run.
        os._exit(ended.code if isinstance(ended.code, int) else bool(ended.code))
