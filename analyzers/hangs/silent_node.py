"""Nodes of which the leader heard nothing for a while: the machine, its watch, or the link between them.

    findings = analyze(store)                       # kind node_silent, one a silence
    findings = analyze(store, ongoing_only=True)    # live: those that have not been heard again

The leader's `watch` writes when a node's digests stay away and when they come again. What the node did meanwhile is in
its own store.
"""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.run.event_log import Event, EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["analyze"]


def analyze(source: Source, *, ongoing_only: bool = False) -> list[Finding]:
    """One finding for each silence; none where all nodes were heard all the time."""
    log = EventLog.load(source, (event_kinds.NODE_SILENT, event_kinds.NODE_HEARD))
    heard = log.of(event_kinds.NODE_HEARD)
    findings = []
    for event in log.of(event_kinds.NODE_SILENT):
        node = event.integer("node_rank")
        again = next((e for e in heard if e.integer("node_rank") == node and e.wall_ns >= event.wall_ns), None)
        if again is None or not ongoing_only:
            findings.append(_finding(event, node, again))
    return findings


def _finding(event: Event, node: int, again: Event | None) -> Finding:
    ranks = tuple(sorted(event.integers("ranks")))
    silent_s = event.number("silent_s") or 0.0
    if again is not None:
        silent_s += (again.wall_ns - event.wall_ns) / 1e9
    lasted = f"for {silent_s:.0f} s" if again is not None else f"since {silent_s:.0f} s before, and not heard again"
    return Finding(
        analyzer="silent_node",
        kind="node_silent",
        severity="warning",
        status="fired",
        ranks=ranks,
        first_step=event.step,
        last_step=event.step,
        cause="heard_again" if again is not None else "silent",
        summary=f"no word from node {node} {lasted}: the machine, its watch, or the link to the leader",
        evidence={
            "attempt": event.attempt,
            "node_rank": node,
            "silent_s": round(silent_s, 1),
            "heard_again": again is not None,
        },
        advice="node-silent",
    )
