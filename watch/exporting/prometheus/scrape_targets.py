"""`targets.json` in the folder of runs: the nodes that serve metrics now, for Prometheus' file discovery.

    with announced(runs_dir, "demo-20261120-120000", 0, "127.0.0.1:40312"):
        ...                                                      # the entry is there while the block runs

A watch that is killed leaves its entry behind; Prometheus then sees `up == 0`, which is right while the run should be
alive. The next watch of the same folder removes entries whose process on this machine is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["TARGETS_FILE", "announced"]

TARGETS_FILE = "targets.json"
MAX_BYTES = 4 << 20


@contextmanager
def announced(runs_dir: Path, run_id: str, node_rank: int, address: str, *, is_tls: bool = False) -> Iterator[None]:
    """Keep an entry in the file until the block ends. A file that cannot be written is ignored."""
    entry = {
        "targets": [address],
        "labels": {
            "__meta_rankscope_run": run_id,
            "__meta_rankscope_node": str(node_rank),
            "__meta_rankscope_pid": str(os.getpid()),
            "__meta_rankscope_host": os.uname().nodename,
            "__scheme__": "https" if is_tls else "http",
            "job": "rankscope",
        },
    }
    with contextlib.suppress(OSError):
        _change(runs_dir, lambda entries: [*entries, entry])
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _change(runs_dir, lambda entries: [other for other in entries if other != entry])


def _change(runs_dir: Path, change: Any) -> None:
    path, lock = runs_dir / TARGETS_FILE, runs_dir / f".{TARGETS_FILE}.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        entries = change([entry for entry in _read(path) if _is_alive(entry)])
        fresh = path.with_name(f".{TARGETS_FILE}-{os.getpid()}")
        fresh.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            loaded = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    return [entry for entry in loaded if isinstance(entry, dict)] if isinstance(loaded, list) else []


def _is_alive(entry: dict[str, Any]) -> bool:
    labels = entry.get("labels")
    if not isinstance(labels, dict) or labels.get("__meta_rankscope_host") != os.uname().nodename:
        return True  # of another machine, or not written by us
    pid = str(labels.get("__meta_rankscope_pid", ""))
    return not pid.isdecimal() or Path(f"/proc/{pid}").exists()
