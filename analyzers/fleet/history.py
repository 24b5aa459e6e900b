"""What one run says of the hosts and devices that it ran on.

history = history_of(store, run.manifest(), diagnosis)
history.incidents           # [Incident(kind="xid", host="gpu-07", device="GPU-1a2b", ...)]
history.hosts["gpu-07"]     # hours that it took part
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from analyzers.diagnose import Diagnosis
from analyzers.finding import Finding
from analyzers.source import Source, lacking
from probes.tape import event_kinds

__all__ = ["Incident", "RunHistory", "history_of"]

_HARDWARE = frozenset({
    "rank_lost", "hang", "xid", "gpu_memory_errors", "replica_mismatch", "fingerprint_chain_broken",
    "gradient_corrupted", "node_silent", "non_finite", "gpu_throttled", "link_errors", "straggler", "host_pressure",
    "excluded",
})  # fmt: skip
"""Kinds that a machine can cause. Which of them a machine did cause, only many runs can tell."""
_NOT_A_MACHINE = frozenset({"exception", "exit", "data", "not_entered", "mismatch"})
"""Causes in the user's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One finding, on one host; `device` is empty where none is known."""

    kind: str
    cause: str
    host: str
    device: str = ""
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """One run. Hours count while the run was recorded."""

    run_id: str
    started_ns: int = 0
    hours: float = 0.0
    restarts: int = 0
    hosts: Mapping[str, float] = field(default_factory=dict)
    """Host -> hours."""
    devices: Mapping[str, float] = field(default_factory=dict)
    """UUID -> hours."""
    host_of_device: Mapping[str, str] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    step_ms: float | None = None
    configuration: str = ""
    """Name of the run and its size: runs that can be compared in speed."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `of_json` reads them."""
        from dataclasses import asdict

        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> RunHistory:
        """Raises TypeError or KeyError for what is no history."""
        incidents = tuple(Incident(**one) for one in values["incidents"])
        return cls(**{**values, "incidents": incidents})


def history_of(source: Source, manifest: Mapping[str, Any], diagnosis: Diagnosis) -> RunHistory:
    """Read one run. Hosts are those of its ranks; a run without that record has none."""
    first_ns, last_ns, step_ms = _bounds(source)
    hours = max(0.0, (last_ns - first_ns) / 3.6e12)
    places = _places(source)
    incidents = [
        incident
        for finding in diagnosis.fired
        if finding.kind in _HARDWARE and finding.cause not in _NOT_A_MACHINE
        for incident in _incidents(finding, places)
    ]
    hosts = {host: hours for host, _ in places.values() if host}
    devices = {device: host for host, device in places.values() if device}
    return RunHistory(
        run_id=str(manifest.get("run_id") or diagnosis.run.get("run_id") or ""),
        started_ns=first_ns,
        hours=hours,
        restarts=_restarts(source),
        hosts=hosts,
        devices=dict.fromkeys(devices, hours),
        host_of_device=devices,
        incidents=tuple(incidents),
        step_ms=step_ms,
        configuration=_configuration(manifest),
    )


def _incidents(finding: Finding, places: Mapping[int, tuple[str, str]]) -> list[Incident]:
    """One a host: several ranks of one host that fail together are one incident of it."""
    node, device = finding.evidence.get("node"), finding.evidence.get("device")
    if isinstance(node, str) and node:
        where = {(node, device if isinstance(device, str) and device.startswith("GPU-") else "")}
    else:
        found = {places[rank] for rank in finding.ranks if rank in places}
        where = {(host, device) for host, device in found if host}
    if len({host for host, _ in where}) > 1:
        return []  # several hosts at once: not one machine's doing
    one_device = len({device for _, device in where}) == 1
    return [
        Incident(
            kind=finding.kind, cause=finding.cause, host=host, device=device if one_device else "",
            cost_s=float(finding.cost_s or 0.0),
        )
        for host, device in sorted(where)[:1]
    ]  # fmt: skip


def _places(source: Source) -> dict[int, tuple[str, str]]:
    """Host and device UUID of each rank, of its newest attempt."""
    if lacking(source, ranks=("host",)):
        return {}
    rows = source.rows(
        "SELECT rank, arg_max(host, wall_ns), arg_max(coalesce(device_uuid, ''), wall_ns) FROM ranks "
        "WHERE rank >= 0 GROUP BY rank"
    )
    return {rank: (host or "", device or "") for rank, host, device in rows}


def _bounds(source: Source) -> tuple[int, int, float | None]:
    if lacking(source, steps=("duration_ns",)):
        return 0, 0, None
    ((first_ns, last_ns, step_ns),) = source.rows(
        "SELECT min(start_ns), max(start_ns + coalesce(duration_ns, 0)), median(duration_ns) FROM steps WHERE rank >= 0"
    )
    return int(first_ns or 0), int(last_ns or 0), step_ns and step_ns / 1e6


def _restarts(source: Source) -> int:
    if not source.has("events"):
        return 0
    ((newest,),) = source.rows("SELECT max(attempt) FROM events WHERE kind = ?", [event_kinds.ATTEMPT_STARTED])
    return int(newest or 0)


def _configuration(manifest: Mapping[str, Any]) -> str:
    run_id = str(manifest.get("run_id") or "")
    return f"{run_id.rsplit('-', 2)[0]} on {manifest.get('world_size', '?')} ranks"
