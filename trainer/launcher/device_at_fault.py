"""Decide whether to blame a rank's death on its device.

    find_culprit({2: Death(code=-6, text=log_tail)}, xids={})        # local rank 2, or None

1. An exception, log or XID that reports a broken device blames that rank's device, however the rank ended.
2. A death by a signal blames the device, since hardware can cause it. This includes SIGKILL, with which `watch` ends a
   hanging rank. The device is not blamed if the text says that another rank, its node or the network was lost, because
   torch's watchdog then ends a healthy rank with SIGABRT.
3. SIGTERM, any other exception, or an out-of-memory kill by the kernel blames nothing.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from analyzers.health.xids import xid_table
from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.rundir import RunDir

__all__ = ["Death", "find_culprit", "log_tail", "xids_by_rank"]

TAIL_BYTES = 1 << 16
_BROKEN_DEVICE = re.compile(
    r"uncorrectable ECC error|fallen off the bus|GPU is lost|hardware stack error|[Uu]ncorrectable NVLink error"
    r"|cudaErrorECCUncorrectable|cudaErrorHardwareStackError|cudaErrorNvlinkUncorrectable"
)
"""Error texts of CUDA and NVML for device faults that no program can cause."""
_LOST_REMOTE = re.compile(
    r"Watchdog caught collective operation timeout|ncclRemoteError|remote process exited|network error"
    r"|Connection (?:was )?(?:closed|reset|refused)|communicator was aborted|NCCL operations have failed or timed out"
    r"|entire process down|[Hh]eartbeat monitor timed out|watchdog got stuck|dumping from other rank",
)
"""Error texts of torch and NCCL for a lost peer or connection. Source: torch 2.13 ProcessGroupNCCL, NCCL's errors."""
_BROKEN_CLASSES = ("ecc", "bus", "hardware")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """End of a rank: exit code (negative for a signal), and the text of its log and error file."""

    code: int
    text: str = ""
    out_of_memory: bool = False


def find_culprit(deaths: Mapping[int, Death], xids: Mapping[int, int]) -> int | None:
    """Return the local rank of the device that is to blame, or None. `deaths` are in order of occurrence."""
    for rank, death in deaths.items():
        if rank in xids or _BROKEN_DEVICE.search(death.text):
            return rank
    # Only the first death counts, because the other ranks then died of the broken connection.
    for rank, death in deaths.items():
        by_hardware = death.code < 0 and death.code != -signal.SIGTERM and not death.out_of_memory
        return rank if by_hardware and not _LOST_REMOTE.search(death.text) else None
    return None


def log_tail(path: Path) -> str:
    """The last part of a rank's log; empty if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def xids_by_rank(run: RunDir, attempt: int, node_rank: int, ranks: Mapping[int, int]) -> dict[int, int]:
    """{local rank: XID} of devices that the driver reported as broken in this attempt. `ranks`: {local rank: rank}."""
    known = xid_table()["xid"]
    by_device = {}
    for event in read_events(run.node_dir(node_rank) / "events.jsonl")[0]:
        meaning = known.get(str(event.get("xid")), {})
        is_broken = meaning.get("severity") == "critical" and meaning.get("class") in _BROKEN_CLASSES
        if event["kind"] == event_kinds.XID and event.get("attempt") == attempt and is_broken:
            by_device[event.get("device")] = int(event["xid"])
    if not by_device:
        return {}
    found = {}
    for local_rank, rank in ranks.items():
        for event in read_events(run.rank_dir(attempt, rank) / "events.jsonl")[0]:
            if event["kind"] == event_kinds.RANK and event.get("device_uuid") in by_device:
                found[local_rank] = by_device[event["device_uuid"]]
    return found
