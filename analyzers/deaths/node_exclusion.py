"""Devices and nodes that were left out of a run because they failed again and again.

    findings = analyze(store)          # kind excluded, one a device or node

The launcher decides (`recovery.max_failures_per_device`, `recovery.max_failures_per_node`). For whoever operates the
machines it is something to look at before it is used again, and a run that is smaller than was asked for.
"""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.run.event_log import Event, EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["analyze"]


def analyze(source: Source) -> list[Finding]:
    """One finding for each that was left out; none where all take part."""
    return [_finding(event) for event in EventLog.load(source, (event_kinds.EXCLUDED,)).of(event_kinds.EXCLUDED)]


def _finding(event: Event) -> Finding:
    node, device, rank = event.integer("node_rank"), event.text("device"), event.integer("excluded_rank")
    what = f"{device} of node {node}" if device else f"node {node}"
    return Finding(
        analyzer="exclusion",
        kind="excluded",
        severity="warning",
        status="fired",
        ranks=(rank,) if rank >= 0 else (),
        cause="device" if device else "node",
        summary=f"{what} is left out after attempt {event.attempt}: {event.text('reason', 'no reason was recorded')}",
        evidence={"node_rank": node, "device": device or None, "num_failures": event.integer("failures")},
        advice="excluded",
        attempt=event.attempt,
    )
