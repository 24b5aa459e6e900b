"""Diagnose a large run in a process of its own, so that the server stays responsive.

    diagnosis = diagnose_in_process(run, now_ns=None)

The analyzers compute for a minute and more on 100 million rows, in Python half of the time: in a thread of the server
they would hold the GIL that the pages need. The process has a lower priority than the server, ends when the server
does, and frees its memory.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from analyzers.account.long_run import MEMORY_BYTES
from analyzers.diagnose import Diagnosis, diagnose
from dashboard.serve import end_with
from probes.tape.rundir import RunDir
from store import Store, StoreError

__all__ = ["diagnose_in_process"]

NICENESS = 5
LIMIT_S = 1_800.0


def diagnose_in_process(run: RunDir, *, now_ns: int | None) -> Diagnosis:
    """Diagnosis by a child process; `now_ns` (epoch) only for a run that is alive. Raises StoreError."""
    command = [sys.executable, "-m", "dashboard.data.diagnosis_process", str(run.path), str(os.getpid())]
    command += [] if now_ns is None else [str(now_ns)]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise StoreError(
            f"{run.path}: the analyzers did not finish within {LIMIT_S:.0f} s: try rankscope analyze {run.path}"
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise StoreError(lines[-1][:500] if lines else f"the analyzers ended with exit code {done.returncode}")
    found = pickle.loads(done.stdout)  # noqa: S301 - our own child wrote it; nothing of the run is unpickled
    assert isinstance(found, Diagnosis)
    return found


def _child(path: str, parent: str, now_ns: str | None = None) -> None:
    if sys.platform == "linux":
        end_with(int(parent))
    os.nice(NICENESS)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed meanwhile must not mix with the result
    run = RunDir.open(Path(path))
    with Store.open(run, catch_up=False, wait_s=30.0, memory_bytes=MEMORY_BYTES, spills=True) as store:
        found = diagnose(
            store, run.manifest(), now_ns=None if now_ns is None else int(now_ns), stacks_dir=run.stacks
        )  # fmt: skip
    with out:
        pickle.dump(found, out)


if __name__ == "__main__":
    try:
        _child(*sys.argv[1:])
    except StoreError as error:
        sys.exit(str(error))
