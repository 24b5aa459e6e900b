"""Diagnose a large run in a separate process: for 100 million rows the analyzers take over a minute.

diagnosis = diagnose_in_process(run, now_ns=None)
"""

from __future__ import annotations

import shlex
from pathlib import Path

from analyzers.account.long_run import MEMORY_BYTES
from analyzers.diagnose import Diagnosis, diagnose
from dashboard.data.processes.child_answer import answer_parent, ask_child
from probes.tape.rundir import RunDir
from store import Store

__all__ = ["diagnose_in_process"]

LIMIT_S = 1_800.0


def diagnose_in_process(run: RunDir, *, now_ns: int | None) -> Diagnosis:
    """Return the diagnosis, computed in a child process. `now_ns` (epoch): only for a live run. Raises StoreError."""
    command = f"rankscope analyze {shlex.quote(str(run.path))}"
    error = f"{run.path}: the analyzers did not finish within {LIMIT_S:.0f} s: try {command}"
    options = () if now_ns is None else (str(now_ns),)
    found = ask_child(
        "dashboard.data.processes.diagnosis_process", str(run.path), *options, limit_s=LIMIT_S, timeout_error=error
    )
    assert isinstance(found, Diagnosis)
    return found


def _diagnose(path: str, now_ns: str | None = None) -> Diagnosis:
    run = RunDir.open(Path(path))
    with Store.open(run, catch_up=False, wait_s=30.0, memory_bytes=MEMORY_BYTES, spills=True) as store:
        return diagnose(store, run.manifest(), now_ns=None if now_ns is None else int(now_ns), stacks_dir=run.stacks)


if __name__ == "__main__":
    answer_parent(_diagnose)
