"""What the devices and hosts of ranks that stand still say: XIDs, readings that ended, errors, load, memory.

    finding = with_devices(source, finding, silent_since_ns)       # of `hang`, before it is told

1. Readings and XIDs count from `BEFORE_S` before the last record on: what broke a rank came shortly before its silence.
2. A GPU whose readings end while its host's go on does not answer any more: it has fallen off the bus, or its driver
   is stuck.
3. An XID, or such a GPU, is told in the summary; the rest is evidence. A device that is busy in the silence is inside
   a kernel (of a collective, most often), an idle one was given nothing to do by its host.

Where nobody sampled, nothing is said and nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from analyzers.finding import Finding
from analyzers.health.analyze import xid_table
from analyzers.run.event_log import EventLog
from analyzers.source import Source, missing_tables
from probes.tape import event_kinds

__all__ = ["with_devices"]

BEFORE_S = 60.0
MUTE_S = 10.0
"""Readings come each second, of all GPUs of a node in turn."""
MAX_RANKS = 8


def with_devices(source: Source, finding: Finding, since_ns: int) -> Finding:
    """The finding with what its ranks' devices and hosts say; `since_ns`: the last record (epoch)."""
    ranks = finding.ranks[:MAX_RANKS]
    if missing_tables(source, "ranks") or finding.attempt is None or not ranks:
        return finding
    marks = ", ".join("?" for _ in ranks)
    places = source.rows(
        "SELECT rank, arg_max(device_uuid, wall_ns), arg_max(host, wall_ns) FROM ranks "
        f"WHERE attempt = ? AND rank IN ({marks}) GROUP BY rank ORDER BY rank",
        [finding.attempt, *ranks],
    )
    begin_ns, end_ns = since_ns - int(BEFORE_S * 1e9), since_ns + int(float(finding.evidence["silent_s"]) * 1e9)
    read: dict[str, Any] = {}
    words = []
    for rank, uuid, host in places:
        said = _host(source, host, since_ns, end_ns) | _gpu(source, uuid, host, begin_ns, since_ns, end_ns)
        codes = _xids(source, uuid, begin_ns, end_ns)
        if codes:
            said["xids"] = codes
            known = xid_table()["xid"].get(str(codes[0]), {})
            words.append(f"the GPU of rank {rank} reported XID {codes[0]} ({known.get('meaning', 'not in the table')})")
        elif said.get("gpu_mute_s"):
            words.append(f"the GPU of rank {rank} has not answered for {said['gpu_mute_s']:.0f} s")
        if said and (not read or (_is_broken(said) and not _is_broken(read))):  # the first broken one's, or the first
            read = said | ({"readings_of_rank": rank} if len(places) > 1 else {})
    summary = "; ".join([finding.summary, *words[:2]])
    return replace(finding, summary=summary, evidence={**finding.evidence, **read})


def _is_broken(said: Mapping[str, Any]) -> bool:
    return bool({"xids", "gpu_mute_s"} & said.keys())


def _gpu(
    source: Source, uuid: str | None, host: str | None, begin_ns: int, since_ns: int, end_ns: int
) -> dict[str, Any]:
    if not uuid or missing_tables(source, "health"):
        return {}
    ((busy, hottest, newest_ns, uncorrected, links),) = source.rows(
        """
        SELECT avg(gpu_utilization_ratio) FILTER (sample_ns >= ?), max(temperature_celsius), max(sample_ns),
               max(ecc_uncorrected_total) - min(ecc_uncorrected_total),
               max(nvlink_errors_total) - min(nvlink_errors_total)
        FROM health WHERE device = ? AND sample_ns BETWEEN ? AND ?
        """,
        [since_ns, uuid, begin_ns, end_ns],
    )
    ((host_ns,),) = source.rows(
        "SELECT max(sample_ns) FROM health WHERE device = 'host' AND node = ? AND sample_ns <= ?", [host or "", end_ns]
    )
    mute_s = (host_ns - newest_ns) / 1e9 if newest_ns and host_ns else 0.0
    known = {
        "gpu_utilization_ratio": None if busy is None else round(busy, 3),
        "temperature_celsius": hottest,
        "gpu_mute_s": round(mute_s, 1) if mute_s >= MUTE_S else None,
        "ecc_uncorrected": uncorrected or None,
        "nvlink_errors": links or None,
    }
    return {name: value for name, value in known.items() if value is not None}


def _host(source: Source, host: str | None, since_ns: int, end_ns: int) -> dict[str, Any]:
    if not host or missing_tables(source, "health"):
        return {}
    ((load, memory),) = source.rows(
        "SELECT median(load_1m / nullif(num_cpus, 0)), max(memory_used_bytes / nullif(memory_total_bytes, 0)) "
        "FROM health WHERE device = 'host' AND node = ? AND sample_ns BETWEEN ? AND ?",
        [host, since_ns, end_ns],
    )
    known = {"host_load_per_cpu": load, "host_memory_ratio": memory}
    return {name: round(value, 3) for name, value in known.items() if value is not None}


def _xids(source: Source, uuid: str | None, begin_ns: int, end_ns: int) -> list[int]:
    if not uuid:
        return []
    events = [
        e for e in EventLog.load(source, (event_kinds.XID,)).of(event_kinds.XID) if begin_ns <= e.wall_ns <= end_ns
    ]
    return [event.integer("xid") for event in events if event.text("device") == uuid]
