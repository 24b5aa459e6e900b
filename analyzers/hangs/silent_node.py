"""Nodes that sent the leader no digest for a while: the machine, its watch, or the link between them failed.

The leader's `watch` records when the digests of a node stop and when they come again. What the node did meanwhile is in
its own store.
"""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.run.event_log import Event, EventLog
from analyzers.scope import Scope
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["silent_nodes"]


def silent_nodes(source: Source, scope: Scope) -> list[Finding]:
    """Findings of kind `node_silent`, one a silence. `watch`, which judges one attempt live, gets those that last."""
    log = EventLog.load(source, (event_kinds.NODE_SILENT, event_kinds.NODE_HEARD))
    ongoing_only = scope.is_live and scope.attempt is not None
    findings = []
    for event in log.of(event_kinds.NODE_SILENT):
        node = event.integer("node_rank")
        ends = (
            e for e in log.of(event_kinds.NODE_HEARD) if e.integer("node_rank") == node and e.wall_ns >= event.wall_ns
        )
        end = next(ends, None)
        if end is None or not ongoing_only:
            findings.append(_finding(event, node, end))
    return findings


def _finding(event: Event, node: int, end: Event | None) -> Finding:
    silent_s = event.number("silent_s") or 0.0
    if end is not None:
        silent_s += (end.wall_ns - event.wall_ns) / 1e9
    where = "its machine, its watch or its link to the leader"
    return Finding(
        analyzer="silent_node",
        kind="node_silent",
        severity="warning",
        status="fired",
        ranks=tuple(sorted(event.integers("ranks"))),
        first_step=event.step,
        last_step=event.step,
        cause="heard_again" if end is not None else "silent",
        summary=f"Node {node} was silent for {silent_s:.0f} s and reports again: {where} was down or slow."
        if end is not None
        else f"Node {node} stopped reporting, at first for {silent_s:.0f} s: {where} is down.",
        evidence={
            "attempt": event.attempt,
            "node_rank": node,
            "silent_s": round(silent_s, 1),
            "heard_again": end is not None,
        },
        advice="node-silent",
    )
