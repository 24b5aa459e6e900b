"""History of one run: its hosts and devices, the incidents on them, and its speed.

history = history_of(store, run.manifest(), diagnosis)
history.incidents           # [Incident(kind="xid", host="gpu-07", device="GPU-1a2b", ...)]
history.hosts               # ("gpu-07", "gpu-08")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from analyzers.deaths.failed_attempts import failed_attempts
from analyzers.diagnose import Diagnosis
from analyzers.finding import Finding
from analyzers.fleet.run_speed import RunSpeed, run_speed
from analyzers.kinds import KINDS
from analyzers.source import Source, lacking
from probes.tape import event_kinds

__all__ = ["Incident", "RunHistory", "history_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One finding on one host. `device`: UUID, empty if no single device is known."""

    kind: str
    cause: str
    host: str
    device: str = ""
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """One run. `hours`: wall time from its first record to its last."""

    run_id: str
    hours: float = 0.0
    restarts: int = 0
    failures: int = 0
    """Attempts that failed; an attempt that was stopped on purpose and resumed is a restart, not a failure."""
    hosts: tuple[str, ...] = ()
    host_of_device: Mapping[str, str] = field(default_factory=dict)
    """Host by device UUID."""
    incidents: tuple[Incident, ...] = ()
    speed: RunSpeed | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, which `of_json` reads back."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> RunHistory:
        """Read plain values. Raises TypeError or KeyError for malformed values."""
        incidents = tuple(Incident(**one) for one in values["incidents"])
        speed = RunSpeed.of_json(values["speed"]) if values["speed"] is not None else None
        return cls(**{**values, "hosts": tuple(values["hosts"]), "incidents": incidents, "speed": speed})


def history_of(
    source: Source, manifest: Mapping[str, Any], diagnosis: Diagnosis, *, is_live: bool = False
) -> RunHistory:
    """Read one run. Hosts come from the records of ranks; without such records `hosts` is empty."""
    places = _hosts_and_devices(source)
    incidents = [
        incident for finding in diagnosis.fired if _can_be_hardware(finding) for incident in _incidents(finding, places)
    ]
    return RunHistory(
        run_id=str(manifest.get("run_id") or diagnosis.run.get("run_id") or ""),
        hours=_hours(source, diagnosis),
        restarts=_restarts(source),
        failures=len(failed_attempts(source, manifest, is_over=not is_live)),
        hosts=tuple(sorted({host for host, _ in places.values() if host})),
        host_of_device={device: host for host, device in places.values() if device},
        incidents=tuple(incidents),
        speed=run_speed(source, manifest, diagnosis.run),
    )


def _can_be_hardware(finding: Finding) -> bool:
    """Return True if broken hardware can have caused the finding. A NaN counts only if a replay on the machine did not
    reproduce it, because most NaNs come from the model, the data or the learning rate."""
    kind = KINDS.get(finding.kind)
    if kind is None or not kind.may_be_hardware or finding.cause in kind.user_causes:
        return False
    return finding.kind != "non_finite" or finding.evidence.get("is_reproduced") is False


def _incidents(finding: Finding, places: Mapping[int, tuple[str, str]]) -> list[Incident]:
    """One incident for a finding, even if several ranks failed together; none without a host or with several hosts."""
    node, device = finding.evidence.get("node"), finding.evidence.get("device")
    if isinstance(node, str) and node:
        where = {(node, device if isinstance(device, str) and device.startswith("GPU-") else "")}
    else:
        found = {places[rank] for rank in finding.ranks if rank in places}
        where = {(host, device) for host, device in found if host}
    if len({host for host, _ in where}) > 1:
        return []  # the finding names several machines, so none of them is to blame
    is_one_device = len({device for _, device in where}) == 1
    return [
        Incident(
            kind=finding.kind, cause=finding.cause, host=host, device=device if is_one_device else "",
            cost_s=float(finding.cost_s or 0.0),
        )
        for host, device in sorted(where)[:1]
    ]  # fmt: skip


def _hosts_and_devices(source: Source) -> dict[int, tuple[str, str]]:
    """Host and device UUID of each rank in its newest attempt."""
    if lacking(source, ranks=("host",)):
        return {}
    rows = source.rows(
        "SELECT rank, arg_max(host, wall_ns), arg_max(coalesce(device_uuid, ''), wall_ns) FROM ranks "
        "WHERE rank >= 0 GROUP BY rank"
    )
    return {rank: (host or "", device or "") for rank, host, device in rows}


def _hours(source: Source, diagnosis: Diagnosis) -> float:
    """Hours of wall time from the account; for a run without an account, from the first to the last recorded step or
    event."""
    if diagnosis.goodput is not None:
        return diagnosis.goodput.wall_s / 3600
    times = []
    if not lacking(source, steps=("start_ns",)):
        times += source.rows("SELECT min(start_ns), max(start_ns + coalesce(duration_ns, 0)) FROM steps")
    if not lacking(source, events=("wall_ns",)):
        times += source.rows("SELECT min(wall_ns), max(wall_ns) FROM events")
    firsts, lasts = [first for first, _ in times if first], [last for _, last in times if last]
    return (max(lasts) - min(firsts)) / 3.6e12 if firsts and lasts else 0.0


def _restarts(source: Source) -> int:
    if not source.has("events"):
        return 0
    ((newest,),) = source.rows("SELECT max(attempt) FROM events WHERE kind = ?", [event_kinds.ATTEMPT_STARTED])
    return int(newest or 0)
