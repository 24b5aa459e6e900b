"""Where a run's copies in memory lie so that they outlive its processes: a folder of shared memory on each node.

    folder = shared_folder(run.path)        # /dev/shm/rankscope-0-1f3a...
    remove_shared(run.path)                 # at the run's end: by the ranks, and by watch after them
    sweep_stale()                           # what runs left whose every process was killed, watch included

Imports no torch: watch uses it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

__all__ = ["PID_NAME", "remove_shared", "shared_folder", "sweep_stale"]

SHARED_MEMORY = Path("/dev/shm")
PID_NAME = "pid"
STALE_S = 600.0
"""A folder without a living process is kept for so long: between two attempts there is none."""


def shared_folder(run_path: Path) -> Path:
    """The folder of one run and user, whether or not it is there."""
    digest = hashlib.blake2b(str(run_path.resolve()).encode(), digest_size=10).hexdigest()
    return SHARED_MEMORY / f"rankscope-{os.getuid()}-{digest}"


def remove_shared(run_path: Path) -> None:
    """Give the memory back."""
    shutil.rmtree(shared_folder(run_path), ignore_errors=True)


def sweep_stale() -> None:
    """Remove this user's folders whose processes are all gone for a while."""
    for folder in SHARED_MEMORY.glob(f"rankscope-{os.getuid()}-*"):
        with contextlib.suppress(OSError, ValueError):
            ranks = [path for path in folder.iterdir() if path.is_dir()]
            pids = [int((rank / PID_NAME).read_text()) for rank in ranks]
            newest_s = max(path.stat().st_mtime for path in (folder, *ranks))
            if time.time() - newest_s > STALE_S and not any(Path(f"/proc/{pid}").exists() for pid in pids):
                shutil.rmtree(folder, ignore_errors=True)
