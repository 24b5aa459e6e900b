"""The line that local rank 0 of an attached loop prints when it ends: what `watch` reported, and where to read more.

    print(last_line(run, node_rank=0), file=sys.stderr)

It uses only the node's events, so no store or analyzer is imported into a user's process.
"""

from __future__ import annotations

from typing import Any

from ..tape import event_kinds
from ..tape.events import read_events
from ..tape.rundir import RunDir
from ..tape.typed_path import analyze_command

__all__ = ["last_line"]

_ORDER = ("critical", "warning", "info")


def last_line(run: RunDir, node_rank: int) -> str:
    """Return one line: the most severe open finding, the number of open findings, and the command for the verdict."""
    command = analyze_command(run.path)
    path = run.node_dir(node_rank) / "events.jsonl"
    try:
        events = read_events(path)[0]
    except OSError:
        events = []
    newest: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["kind"] == event_kinds.FINDING:
            newest[str(event.get("id"))] = event
    fired = [event for event in newest.values() if event.get("status") == "fired"]
    if not fired:
        return f"rankscope: no problems were reported during the run. For the verdict: {command}"
    fired.sort(key=lambda event: _ORDER.index(event["severity"]) if event.get("severity") in _ORDER else len(_ORDER))
    more = f" {len(fired) - 1} more." if len(fired) > 1 else ""
    return f"rankscope: {fired[0].get('summary')}{more} The verdict: {command}"
