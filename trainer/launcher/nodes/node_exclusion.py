"""Nodes that fail again and again, and are left out of a run until somebody has looked at them.

    begin_to_count(run, let_in=False)            # node 0, when the run is resumed; let_in: with --force
    count_failures(run, node_rank=1)             # a launcher, before its own life begins
    leave_out(run, node_rank=1, reason="3 failures, the last: ...")
    why_left_out(run, node_rank=1)               # "" while it may take part

What counts: a rank that died of a signal that hardware can cause (or was killed because it hung), and a launcher that
ended without its last word, as when the machine was lost. Both are in the events that the node wrote, so the count
outlives the launcher; it begins anew when the run is resumed. That a node is left out is a file beside the attempts:
whoever starts it again is told, and that he may delete it.
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

__all__ = ["NODE_FAILURES", "begin_to_count", "count_failures", "leave_out", "left_out_path", "why_left_out"]

NODE_FAILURES = 6
"""On GPUs. Twice what one device may do: a node whose failures come from one device loses that device first."""


def begin_to_count(run: RunDir, *, let_in: bool) -> None:
    """Forget what nodes did before; with `let_in`, those that were left out may come back too. Raises OSError."""
    folder = _folder(run)
    folder.mkdir(exist_ok=True)
    write_json(folder / "counted-from.json", {"wall_ns": time.time_ns()})
    for path in folder.glob("node-*.left-out.json") if let_in else ():
        path.unlink(missing_ok=True)


def count_failures(run: RunDir, node_rank: int) -> int:
    """Deaths of this node's ranks that were blamed on hardware, and lives of its launcher that have no end."""
    since_ns = _read(_folder(run) / "counted-from.json").get("wall_ns", 0)
    events, _, _ = read_events(run.node_dir(node_rank) / "events.jsonl")
    events = [event for event in events if event.get("wall_ns", 0) > since_ns]
    blamed = sum(event["kind"] == event_kinds.RANK_EXIT and event.get("blamed") is True for event in events)
    begun = sum(event["kind"] == event_kinds.RUN_STARTED for event in events)
    ended = sum(event["kind"] == event_kinds.RUN_ENDED for event in events)
    return blamed + max(0, begun - ended)


def leave_out(run: RunDir, node_rank: int, reason: str) -> None:
    """From now on. A folder that cannot be written keeps nobody from leaving: then it is only not remembered."""
    try:
        write_json(left_out_path(run, node_rank), {"reason": reason, "wall_ns": time.time_ns()})
    except OSError:
        return


def why_left_out(run: RunDir, node_rank: int) -> str:
    """Empty if it is not."""
    return str(_read(left_out_path(run, node_rank)).get("reason", ""))


def left_out_path(run: RunDir, node_rank: int) -> Path:
    """The file that says so."""
    return _folder(run) / f"node-{node_rank}.left-out.json"


def _folder(run: RunDir) -> Path:
    return run.path / "attempts"


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_bytes()[: 1 << 20])
    except (OSError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
