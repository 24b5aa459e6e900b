"""Compute an answer for the pages in a separate process, so that the server stays responsive.

    # in a module `dashboard.data.x_process`:
    def x_in_process(path: Path) -> X:
        return ask_child("dashboard.data.x_process", str(path), limit_s=60.0, timeout_error="not read within 60 s")

    if __name__ == "__main__":
        answer_parent(compute)                  # gets the path as text

In a server thread the analyzers would hold the GIL that the pages need. The process has a lower priority than the
server, ends when the server ends, and frees its memory.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from dashboard.serve import end_with
from store import StoreError

__all__ = ["answer_parent", "ask_child"]

NICENESS = 10
"""Niceness of the child: on a busy core it gets a tenth of the time. At 5 it took a quarter, which slowed each page
refresh.
"""


def ask_child(module: str, *arguments: str, limit_s: float, timeout_error: str) -> Any:
    """Return the answer of `python -m module`. Raises StoreError with the child's last line if it fails, or with
    `timeout_error` after `limit_s`.
    """
    command = [sys.executable, "-m", module, str(os.getpid()), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as child:
        # set here, since the child's imports alone take a second of CPU time
        os.setpriority(os.PRIO_PROCESS, child.pid, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
        try:
            answer, errors = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            child.kill()
            raise StoreError(timeout_error) from None
    if child.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise StoreError(lines[-1][:500] if lines else f"{module} ended with exit code {child.returncode}")
    return pickle.loads(answer)  # noqa: S301 - written by our child; nothing from a run is unpickled


def answer_parent(compute: Callable[..., Any]) -> None:
    """The child's side: return `compute(*arguments)` to the parent, or exit with the one line of a StoreError."""
    parent, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        end_with(int(parent))
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the computation prints must not mix with the answer
    try:
        found = compute(*arguments)
    except StoreError as error:
        sys.exit(str(error))
    with out:
        pickle.dump(found, out)
