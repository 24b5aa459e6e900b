"""Devices and nodes that were excluded from a run because they failed repeatedly, slowed it down, or must be replaced.

The launcher decides (`recovery.max_failures_per_device`, `recovery.max_failures_per_node`), or follows a request of
`watch` (`recovery.on_straggler`, `recovery.on_xid`). The run continues on fewer ranks than were asked for. An operator
should check the excluded devices before they are used again.
"""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.run.records.event_log import Event, EventLog
from analyzers.scope import Scope
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["exclusions"]


def exclusions(source: Source, scope: Scope) -> list[Finding]:
    """Findings of kind `excluded`, one per device or node."""
    return [_finding(event) for event in EventLog.load(source, (event_kinds.EXCLUDED,)).of(event_kinds.EXCLUDED)]


def _finding(event: Event) -> Finding:
    node, device, rank = event.integer("node_rank"), event.text("device"), event.integer("excluded_rank")
    what = f"Device {device} of node {node}" if device else f"Node {node}"
    reason = event.text("reason", "no reason was recorded").rstrip(".")
    return Finding(
        analyzer="exclusion",
        kind="excluded",
        severity="warning",
        status="fired",
        ranks=(rank,) if rank >= 0 else (),
        cause="device" if device else "node",
        summary=f"{what} was excluded after attempt {event.attempt}: {reason}.",
        evidence={
            "node_rank": node,
            "device": device or None,
            "num_failures": event.integer("failures"),
            **({"excluded_for": event.text("cause")} if event.text("cause") else {}),
        },
        advice="excluded",
        attempt=event.attempt,
    )
