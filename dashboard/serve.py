"""The server's process: Streamlit on our script; it ends when the command that started it does, however that ends.

    RANKSCOPE_DASHBOARD_PARENT=4711 python -m dashboard.serve --server.port 8501

A command that is killed by SIGKILL cannot stop its server; the kernel does (PR_SET_PDEATHSIG), and no server is left on
the port.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

__all__ = ["end_with", "import_pages"]

APP = Path(__file__).parent / "app.py"
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent ends; exit if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(0)


def import_pages() -> threading.Thread:
    """Import in the background what the pages need, seconds of work that the first visitor would wait for."""
    thread = threading.Thread(target=import_module, args=("dashboard.navigation",), name="import-pages", daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    if sys.platform == "linux":
        end_with(int(os.environ["RANKSCOPE_DASHBOARD_PARENT"]))
    from streamlit.web import cli

    from dashboard.page_base import name_the_root
    from dashboard.request_site import check_every_request

    check_every_request()
    name_the_root()
    import_pages()
    sys.argv = ["streamlit", "run", str(APP), *sys.argv[1:]]
    cli.main()
