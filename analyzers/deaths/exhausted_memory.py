"""Evidence for a rank that ran out of CUDA memory, from the snapshot that it wrote before it ended.

    finding = with_snapshot(source, finding)
    finding.evidence["largest_allocations"]       # ["model/attention.py:88 in forward: 12 GiB in 64 blocks", ...]

A rank on a CPU, and one that was killed, has none: nothing is added then.
"""

from __future__ import annotations

import re
from dataclasses import replace

from analyzers.finding import Finding
from analyzers.memory.snapshot_text import snapshot_evidence
from analyzers.run.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["with_snapshot"]

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def with_snapshot(source: Source, finding: Finding) -> Finding:
    """The finding with what the snapshot of the first of its ranks shows."""
    log = EventLog.load(source, (event_kinds.MEMORY_SNAPSHOT,), attempt=finding.attempt)
    event = next((one for one in log.of(event_kinds.MEMORY_SNAPSHOT) if one.rank in finding.ranks), None)
    if event is None:
        return finding
    unused = event.integer("unused_bytes", -1)
    found = snapshot_evidence(event.detail, unused_bytes=unused if unused >= 0 else None)
    if found["requested_bytes"] is None and (asked := _ASKED.search(str(finding.evidence.get("message") or ""))):
        found["requested_bytes"] = round(float(asked[1]) * _UNITS[asked[2]])
    place = {"memory_snapshot": event.text("path") or None, "snapshot_rank": event.rank}
    return replace(finding, evidence={**finding.evidence, **found, **place})
