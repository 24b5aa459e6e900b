"""XIDs that a program causes: assign each to its rank, so that no device is blamed for a fault in a kernel.

    victims = failed_with(event, log, ranks_of_device)      # ranks that the fault ended; () if none

1. An assertion, an index out of range or an illegal access in a kernel makes the driver report an XID of class
   `application`. The process sees a CUDA error at its next synchronisation, or is aborted.
2. NVML names the device but no process. So the XID is attributed to a rank on that device that ended around that time,
   with a CUDA error, or by a signal without an error. It becomes evidence of the rank's `rank_lost` finding.
3. If no rank ended in this way, any process on the device may have caused the XID, so it is only advice.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from analyzers.health.policy import HealthPolicy
from analyzers.run.records.event_log import Event, EventLog
from probes.tape import event_kinds

__all__ = ["ENDS", "failed_with", "is_of_kernel"]

ENDS = (event_kinds.EXCEPTION, event_kinds.RANK_EXIT)
_OF_KERNEL = re.compile(
    r"CUDA error|device-side assert|illegal memory access|illegal instruction|misaligned address|"
    r"unspecified launch failure|CUDA_ERROR_|Triton Error"
)
_NO_MEMORY = re.compile(r"out of memory", re.IGNORECASE)


def is_of_kernel(message: str) -> bool:
    """Return True for a CUDA error that follows a fault in one of the process's kernels."""
    return _OF_KERNEL.search(message) is not None and _NO_MEMORY.search(message) is None


def failed_with(event: Event, log: EventLog, ranks: Collection[int]) -> tuple[int, ...]:
    """Ranks on a device that ended because of the fault that an XID event reports. `log` holds the kinds `ENDS`."""
    within_ns = int(HealthPolicy().program_fault_s * 1e9)

    def is_near(end: Event) -> bool:
        return abs(end.wall_ns - event.wall_ns) <= within_ns

    raised = [end for end in log.of(event_kinds.EXCEPTION, attempt=event.attempt) if end.rank in ranks and is_near(end)]
    failed = {end.rank for end in raised if is_of_kernel(f"{end.text('type')}: {end.text('message')}")}
    if not failed:
        has_raised = {end.rank for end in raised}
        exits = log.of(event_kinds.RANK_EXIT, attempt=event.attempt)
        signalled = {end.integer("exit_rank") for end in exits if end.text("signal") and is_near(end)}
        failed = (signalled & set(ranks)) - has_raised
    return tuple(sorted(failed))
