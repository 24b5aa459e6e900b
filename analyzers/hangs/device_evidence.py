"""Add readings of the named ranks' devices and hosts to a hang: XIDs, GPUs that no longer answer, errors, load, memory.

    finding = with_devices(source, finding, silent_since_ns)       # of `hang_of_attempt`

1. Readings and XIDs count if they are at most `before_s` older than the last record.
2. If the readings of a GPU end while the readings of its host continue, the GPU no longer answers: it has fallen off
   the bus, or its driver is stuck.
3. An XID, or such a GPU, is named in the summary; the rest is evidence. A device that is busy during the silence runs a
   kernel (usually of a collective); an idle one got no work from its host.

Without readings the finding stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from analyzers.communication.network_links import stalled_link
from analyzers.finding import Finding, evidence_of
from analyzers.hangs.policy import DeviceEvidencePolicy
from analyzers.health.xids import xid_table
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source, missing_tables
from analyzers.wording import MAX_RANKS
from probes.tape import event_kinds

__all__ = ["with_devices", "with_link"]


def with_devices(
    source: Source, finding: Finding, since_ns: int, policy: DeviceEvidencePolicy | None = None
) -> Finding:
    """The finding with the readings of its ranks' devices and hosts; `since_ns`: the last record (epoch)."""
    policy, ranks = policy or DeviceEvidencePolicy(), finding.ranks[:MAX_RANKS]
    if missing_tables(source, "ranks") or finding.attempt is None or not ranks:
        return finding
    marks = ", ".join("?" for _ in ranks)
    places = source.rows(
        "SELECT rank, arg_max(device_uuid, wall_ns), arg_max(host, wall_ns), arg_max(pid, wall_ns) FROM ranks "
        f"WHERE attempt = ? AND rank IN ({marks}) GROUP BY rank ORDER BY rank",
        [finding.attempt, *ranks],
    )
    begin_ns = since_ns - int(policy.before_s * 1e9)
    end_ns = since_ns + int(float(evidence_of(finding)["silent_s"]) * 1e9)
    evidence: dict[str, Any] = {}
    sentences = []
    for rank, uuid, host, _ in places:
        found = _host(source, host, since_ns, end_ns) | _gpu(source, uuid, host, (begin_ns, since_ns, end_ns), policy)
        if codes := _xids(source, uuid, begin_ns, end_ns):
            found["xids"] = codes
            known = xid_table()["xid"].get(str(codes[0]), {})
            sentences.append(
                f"The GPU of rank {rank} reported XID {codes[0]}: {known.get('meaning', 'an unknown code')}."
            )
        elif found.get("gpu_mute_s"):
            sentences.append(f"The GPU of rank {rank} has not answered for {found['gpu_mute_s']:.0f} s.")
        is_first = not evidence or (_is_broken(found) and not _is_broken(evidence))
        if found and is_first:  # keep the readings of the first broken device, or of the first device if none is broken
            evidence = found | ({"readings_of_rank": rank} if len(places) > 1 else {})
    if finding.cause == "stopped":
        evidence |= _processes([(host, pid) for _, _, host, pid in places])
    summary = " ".join([finding.summary, *sentences[:2]])
    return replace(finding, summary=summary, evidence={**finding.evidence, **evidence})


def _processes(places: Sequence[tuple[str | None, int | None]]) -> dict[str, Any]:
    """Host and process ids of stopped ranks, for a command that resumes these processes. Empty if the ranks are on
    several hosts."""
    hosts, pids = {host for host, _ in places}, [pid for _, pid in places if pid]
    return {"host": hosts.pop(), "pids": pids} if len(hosts) == 1 and None not in hosts and pids else {}


def with_link(source: Source, finding: Finding) -> Finding:
    """For a hang in a call that all ranks entered, add the link on which this call moved the least data.

    Without such a link the finding stays as it is.
    """
    facts = evidence_of(finding)
    if finding.cause != "all_entered" or finding.attempt is None or facts.get("seq") is None:
        return finding
    link = stalled_link(source, finding.attempt, str(facts["process_group"]), int(facts["seq"]))
    if link is None:
        return finding
    ends = tuple(sorted((link.rank, link.peer)))
    waiting = sorted({*finding.ranks, *facts["waiting_ranks"]} - set(ends))
    more = {"link_rank": link.rank, "link_peer": link.peer, "link_channel": link.channel, "waiting_ranks": waiting}
    summary = f"{finding.summary} The link from {link.text}, moved the least data."
    return replace(finding, ranks=ends, summary=summary, evidence={**facts, **more})


def _is_broken(readings: Mapping[str, Any]) -> bool:
    return bool({"xids", "gpu_mute_s"} & readings.keys())


def _gpu(
    source: Source, uuid: str | None, host: str | None, times_ns: tuple[int, int, int], policy: DeviceEvidencePolicy
) -> dict[str, Any]:
    """Readings of a GPU; `times_ns`: start of the readings that count, last record of the run, end of the silence."""
    begin_ns, since_ns, end_ns = times_ns
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
        "gpu_mute_s": round(mute_s, 1) if mute_s >= policy.mute_s else None,
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
