"""Ingest the tapes of a run in a separate process: with many ranks this takes minutes, and pages must stay responsive.

catch_up_in_process(run)
"""

from __future__ import annotations

import shlex
from pathlib import Path

from dashboard.data.processes.child_answer import answer_parent, ask_child
from probes.tape.rundir import RunDir
from store import Store

__all__ = ["catch_up_in_process"]

LIMIT_S = 1_800.0


def catch_up_in_process(run: RunDir) -> None:
    """Bring the store up to date in a child process. Raises StoreError."""
    command = f"rankscope analyze {shlex.quote(str(run.path))}"
    error = f"{run.path}: its tapes were not read within {LIMIT_S:.0f} s: try {command}"
    ask_child("dashboard.data.processes.catch_up_process", str(run.path), limit_s=LIMIT_S, timeout_error=error)


def _catch_up(path: str) -> None:
    Store.open(RunDir.open(Path(path)), catch_up=True).close()


if __name__ == "__main__":
    answer_parent(_catch_up)
