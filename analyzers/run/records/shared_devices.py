"""Detect devices that several ranks share, or that processes of other jobs also use. A plan for one rank per device
does not apply to them.

if devices_are_shared(source):
    ...
"""

from __future__ import annotations

from analyzers.policy import SHARED
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source, lacking
from probes.tape import event_kinds

__all__ = ["devices_are_shared"]


def devices_are_shared(source: Source) -> bool:
    """Return True if several ranks, or processes of other jobs, use one device.

    NVML does not list processes outside of a container, but counts their memory.
    """
    if lacking(source, ranks=("device_uuid", "host")):
        return False
    peaks: dict[tuple[int, int], int] = {}
    for event in EventLog.load(source, (event_kinds.MEMORY_PEAK,)).of(event_kinds.MEMORY_PEAK):
        place = event.attempt, event.rank
        peaks[place] = max(peaks.get(place, 0), event.integer("allocated_bytes"))
    own_bytes: dict[str, int] = {}
    for attempt, uuid, ranks in source.rows(
        "SELECT attempt, device_uuid, list(DISTINCT rank) FROM ranks WHERE rank >= 0 AND device_uuid <> '' "
        "GROUP BY attempt, host, device_uuid"
    ):
        if len(ranks) > 1:
            return True
        if (attempt, ranks[0]) in peaks:
            own_bytes[uuid] = max(own_bytes.get(uuid, 0), peaks[attempt, ranks[0]])
    if not own_bytes or lacking(source, health=("memory_used_bytes",)):
        return False
    used = source.rows("SELECT device, median(memory_used_bytes) FROM health WHERE device <> 'host' GROUP BY device")
    return any(
        num_bytes - SHARED.doubled_factor * own_bytes[uuid] > SHARED.smallest_memory_bytes
        for uuid, num_bytes in used
        if uuid in own_bytes
    )
