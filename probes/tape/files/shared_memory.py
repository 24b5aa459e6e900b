"""Shared-memory folder on each node for a run's in-memory checkpoint copies. The copies outlive the run's processes.

    folder = shared_folder(run.path)        # /dev/shm/rankscope-0-1f3a...-node0
    remove_shared(run.path, node_rank)      # at the run's end: called by the ranks, then by watch
    sweep_stale(run.path)                   # remove leftovers of other runs whose processes were all killed

Imports no torch: watch uses it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

__all__ = ["PID_NAME", "remove_shared", "shared_folder", "sweep_stale", "this_node"]

SHARED_MEMORY = Path("/dev/shm")
PID_NAME = "pid"
STALE_S = 600.0
"""Seconds that a folder without a live process is kept, because between two attempts no process is alive."""


def shared_folder(run_path: Path, node_rank: int | None = None) -> Path:
    """Path of the folder of one run, user and node (default: this process's node); it need not exist.

    The name contains the node, because several nodes may run on one machine and must not share this memory.
    """
    digest = hashlib.blake2b(str(run_path.resolve()).encode(), digest_size=10).hexdigest()
    return SHARED_MEMORY / f"rankscope-{os.getuid()}-{digest}-node{this_node() if node_rank is None else node_rank}"


def this_node() -> int:
    """Number of this process's node, from the launcher's environment variable."""
    return int(os.environ.get("RANKSCOPE_NODE_RANK", os.environ.get("GROUP_RANK", 0)))


def remove_shared(run_path: Path, node_rank: int | None = None) -> None:
    """Remove a run's folder, which frees its memory."""
    shutil.rmtree(shared_folder(run_path, node_rank), ignore_errors=True)


def sweep_stale(run_path: Path) -> None:
    """Remove this user's folders that have no live process and have not changed for `STALE_S`, except those of this
    run: after a long hang or between rare copies, its restart still needs them.
    """
    own, _, _ = shared_folder(run_path).name.rpartition("-node")
    for folder in SHARED_MEMORY.glob(f"rankscope-{os.getuid()}-*"):
        if folder.name.rpartition("-node")[0] == own:
            continue
        with contextlib.suppress(OSError, ValueError):
            ranks = [path for path in folder.iterdir() if path.is_dir()]
            pids = [int((rank / PID_NAME).read_text()) for rank in ranks]
            newest_s = max(path.stat().st_mtime for path in (folder, *ranks))
            if time.time() - newest_s > STALE_S and not any(Path(f"/proc/{pid}").exists() for pid in pids):
                shutil.rmtree(folder, ignore_errors=True)
