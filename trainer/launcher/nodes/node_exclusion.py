"""Exclude nodes that fail repeatedly, until an operator clears them.

    reset_failure_counts(run, readmit=False)     # node 0, when the run is resumed; readmit: with --force
    count_failures(run, node_rank=1)             # in a launcher, before it starts ranks
    exclude_node(run, node_rank=1, reason="3 failures, the last: ...")
    exclusion_reason(run, node_rank=1)           # "" while it may take part

Two kinds of failures count: a rank that died by a signal that hardware can cause (or was killed because it hung), and a
launcher that ended without recording its end, as when a machine is lost. Both are in the node's events, so the count
outlives the launcher; it starts over when the run is resumed. The exclusion is a file next to the attempts. The next
launch on that node names the file, and deleting it readmits the node.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from trainer.checkpoint.disk_tier.manifest import write_json

__all__ = [
    "NODE_FAILURES",
    "count_failures",
    "exclude_node",
    "exclusion_path",
    "exclusion_reason",
    "reset_failure_counts",
]

NODE_FAILURES = 6
"""Default failure limit of a node with GPUs: twice the limit of a device, so that a node with one bad device loses that
device first."""


def reset_failure_counts(run: RunDir, *, readmit: bool) -> None:
    """Forget earlier failures of nodes; with `readmit`, excluded nodes may join again. Raises OSError."""
    folder = _folder(run)
    folder.mkdir(exist_ok=True)
    write_json(folder / "counted-from.json", {"wall_ns": time.time_ns()})
    for path in folder.glob("node-*.left-out.json") if readmit else ():
        path.unlink(missing_ok=True)


def count_failures(run: RunDir, node_rank: int) -> int:
    """Number of failures: deaths of this node's ranks that were blamed on hardware, and launchers without a recorded
    end."""
    since_ns = _read(_folder(run) / "counted-from.json").get("wall_ns", 0)
    events, _, _ = read_events(run.node_dir(node_rank) / "events.jsonl")
    events = [event for event in events if event.get("wall_ns", 0) > since_ns]
    blamed: int = sum(event["kind"] == event_kinds.RANK_EXIT and event.get("blamed") is True for event in events)
    started: int = sum(event["kind"] == event_kinds.RUN_STARTED for event in events)
    ended: int = sum(event["kind"] == event_kinds.RUN_ENDED for event in events)
    return blamed + max(0, started - ended)


def exclude_node(run: RunDir, node_rank: int, reason: str) -> None:
    """Record the exclusion; does nothing if the folder cannot be written."""
    try:
        write_json(exclusion_path(run, node_rank), {"reason": reason, "wall_ns": time.time_ns()})
    except OSError:
        return


def exclusion_reason(run: RunDir, node_rank: int) -> str:
    """Reason why a node is excluded; empty if it is not."""
    return str(_read(exclusion_path(run, node_rank)).get("reason", ""))


def exclusion_path(run: RunDir, node_rank: int) -> Path:
    """The file that records the exclusion of a node."""
    return _folder(run) / f"node-{node_rank}.left-out.json"


def _folder(run: RunDir) -> Path:
    return run.path / "attempts"


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_bytes()[: 1 << 20])
    except (OSError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
