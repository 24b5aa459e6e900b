"""A rank that ended of a fault in one of its kernels: the XIDs of its device are of the same fault.

finding = with_xids(source, finding)
finding.evidence["xids"]          # [43]
"""

from __future__ import annotations

from dataclasses import replace

from analyzers.finding import Finding
from analyzers.health.program_faults import ENDS, failed_with
from analyzers.health.xids import is_of_program, xid_table
from analyzers.run.event_log import EventLog
from analyzers.source import Source, lacking
from probes.tape import event_kinds

__all__ = ["with_xids"]


def with_xids(source: Source, finding: Finding) -> Finding:
    """The finding with the XIDs that its ranks caused; of a rank without an error, they are named in its summary."""
    if finding.attempt is None or lacking(source, ranks=("device_uuid",)):
        return finding
    log = EventLog.load(source, (event_kinds.XID, *ENDS))
    events = [
        event for event in log.of(event_kinds.XID, attempt=finding.attempt) if is_of_program(event.integer("xid"))
    ]
    if not events:
        return finding
    rows = source.rows(
        "SELECT device_uuid, list(DISTINCT rank) FROM ranks WHERE attempt = ? AND device_uuid IS NOT NULL GROUP BY ALL",
        [finding.attempt],
    )
    devices = {str(uuid): ranks for uuid, ranks in rows}
    own = set(finding.ranks)
    codes = sorted(
        {e.integer("xid") for e in events if own & set(failed_with(e, log, devices.get(e.text("device"), ())))}
    )
    if not codes:
        return finding
    summary = finding.summary
    if finding.cause == "signal":
        meaning = xid_table()["xid"][str(codes[0])]["meaning"].replace(";", ",").rstrip(".")
        summary = f"{summary} Its GPU reported XID {codes[0]}: {meaning}."
    return replace(finding, summary=summary, evidence={**finding.evidence, "xids": codes})
