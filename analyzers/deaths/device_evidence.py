"""Evidence from the device for the end of a rank: a fault in one of its kernels, or CUDA memory that ran out.

    finding = with_xids(source, finding)
    finding.evidence["xids"]                      # [43]: XIDs of the rank's device, from the same fault
    finding = with_cuda_memory(source, finding)
    finding.evidence["holders"]                   # ["process 4711: 118 GiB", ...] on the same device
    finding.evidence["largest_allocations"]       # ["model/attention.py:88 in forward: 12 GiB in 64 blocks", ...]

1. The error's message describes the moment of the failure, so its figures take precedence over the snapshot's.
2. A snapshot that was written after the stack had unwound does not list what filled the memory: its allocations are
   left out if the message states twice as much memory in use.
3. The watchdog of a communicator aborts a process some steps after a kernel failed. If an XID was recorded, the finding
   gets the step of the oldest call that the device had not started.
4. If other processes hold the memory, the summary names them. A rank that ran on a CPU or was killed has neither
   message nor snapshot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from analyzers.finding import Finding
from analyzers.health.program_faults import ENDS, failed_with
from analyzers.health.xids import is_of_program, xid_table
from analyzers.memory.allocator_message import holders_text, memory_of_message, others_hold_it
from analyzers.memory.snapshot_text import snapshot_evidence
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source, lacking
from analyzers.wording import sentence, size_text
from probes.tape import event_kinds

__all__ = ["with_cuda_memory", "with_xids"]

_ALLOCATIONS = ("largest_allocations", "largest_site")
"""Evidence that is left out if the snapshot was written after the stack had unwound."""


def with_xids(source: Source, finding: Finding) -> Finding:
    """Add the XIDs that the finding's ranks caused. The summary names the first one if a signal ended the rank."""
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
    by_device = {str(uuid): ranks for uuid, ranks in rows}
    ranks = set(finding.ranks)
    codes = sorted(
        {e.integer("xid") for e in events if ranks & set(failed_with(e, log, by_device.get(e.text("device"), ())))}
    )
    if not codes:
        return finding
    summary, step = finding.summary, finding.first_step
    if finding.cause == "signal":
        meaning = xid_table()["xid"][str(codes[0])]["meaning"].replace(";", ",").rstrip(".")
        summary = f"{summary} Its GPU reported XID {codes[0]}: {meaning}."
        device_step = finding.evidence.get("device_step")
        if isinstance(device_step, int) and step is not None and device_step < step:
            summary, step = f"{summary} Its device had reached step {device_step}.", device_step
    evidence = {**finding.evidence, "xids": codes}
    return replace(finding, summary=summary, evidence=evidence, first_step=step, last_step=step)


def with_cuda_memory(source: Source, finding: Finding) -> Finding:
    """Add the figures from the error message and from the memory snapshot of the finding's ranks."""
    message = str(finding.evidence.get("message") or "")
    ranks = _ranks_of_pids(source, finding)
    stated = memory_of_message(message, ranks, [pid for pid, rank in ranks.items() if rank in finding.ranks[:1]])
    shown = _snapshot(source, finding)
    is_at_failure = shown.pop("is_at_failure", True)
    if not is_at_failure and stated.get("allocated_bytes", 0) > 2 * (shown["allocated_bytes"] or 0):
        shown = {name: value for name, value in shown.items() if name not in _ALLOCATIONS}
    found = replace(finding, evidence={**finding.evidence, **shown, **stated})
    if not others_hold_it(found.evidence):
        return found
    held, device_bytes = size_text(stated["others_bytes"]), stated.get("device_bytes")
    of_device = f" of the device's {size_text(device_bytes)}" if device_bytes else ""
    who = sentence(f"other processes hold {held}{of_device}: {holders_text(stated)}")
    return replace(found, summary=f"{found.summary} {who}")


def _snapshot(source: Source, finding: Finding) -> dict[str, Any]:
    log = EventLog.load(source, (event_kinds.MEMORY_SNAPSHOT,), attempt=finding.attempt)
    event = next((one for one in log.of(event_kinds.MEMORY_SNAPSHOT) if one.rank in finding.ranks), None)
    if event is None:
        return {}
    unused = event.integer("unused_bytes", -1)
    found = snapshot_evidence(event.detail, unused_bytes=unused if unused >= 0 else None)
    place = {"memory_snapshot": event.text("path") or None, "snapshot_rank": event.rank}
    return {**found, **place, "is_at_failure": event.detail.get("is_at_failure") is not False}


def _ranks_of_pids(source: Source, finding: Finding) -> dict[int, int]:
    """{pid: rank} on the host of the finding's first rank. The driver reports pids of the host, which may differ from
    the recorded pids of ranks in containers."""
    if lacking(source, ranks=("pid", "host")) or not finding.ranks:
        return {}
    rows = source.rows(
        "SELECT pid, rank FROM ranks WHERE attempt = ? AND pid IS NOT NULL AND host = "
        "(SELECT any_value(host) FROM ranks WHERE attempt = ? AND rank = ?)",
        [finding.attempt, finding.attempt, finding.ranks[0]],
    )
    return {int(pid): int(rank) for pid, rank in rows}
