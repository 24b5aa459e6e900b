"""Host counters that rose during the run: InfiniBand ports, TCP, a cgroup's CPU limit, waits for memory and disks.

    host_counter_findings(store, HealthPolicy())        # kinds link_errors, host_pressure

1. Counters start when the host boots, so only their rise during the run is judged.
2. A missing counter is not a finding: most hosts have neither InfiniBand nor a CPU limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analyzers.finding import Finding
from analyzers.health.policy import HealthPolicy
from analyzers.policy import SHARED
from analyzers.source import Source, lacking

__all__ = ["disk_latency_findings", "health_warning", "host_counter_findings", "rise"]

_COLUMNS = (
    "infiniband_errors_total", "infiniband_downs_total", "tcp_retransmits_total", "tcp_segments_total",
    "cgroup_throttled_seconds_total", "memory_pressure_ratio",
)  # fmt: skip


def rise(column: str, kind: str = "BIGINT") -> str:
    """SQL expression for the largest minus the first reading: the last one is lower if the driver was reloaded."""
    return f"CAST(max({column}) - min_by({column}, sample_ns) AS {kind})"


def host_counter_findings(source: Source, policy: HealthPolicy) -> list[Finding]:
    """Findings of each host."""
    if lacking(source, health=_COLUMNS):  # a store of an older version lacks these columns
        return []
    found: list[Finding] = []
    for node, errors, downs, resent, sent, stopped_s, pressure, took_s, readings in source.rows(
        f"""
        SELECT node, {rise("infiniband_errors_total")}, {rise("infiniband_downs_total")},
               {rise("tcp_retransmits_total")}, {rise("tcp_segments_total")},
               {rise("cgroup_throttled_seconds_total", "DOUBLE")}, avg(memory_pressure_ratio),
               (max(sample_ns) - min(sample_ns)) / 1e9, count(*)
        FROM health WHERE device = 'host' GROUP BY node ORDER BY node
        """
    ):
        found += _links(node, errors, downs, policy)
        found += _tcp(node, resent, sent, policy)
        if readings >= SHARED.min_steps and took_s > 0:
            found += _pressure(node, stopped_s, pressure, took_s)
    return found


def disk_latency_findings(source: Source, policy: HealthPolicy) -> list[Finding]:
    """Advise on hosts with a disk that was slow in most readings; a reading without requests is not slow."""
    worst: dict[str, tuple[float, float, str]] = {}
    for request in ("read", "write"):
        column = f"disk_{request}_latency_seconds"
        if lacking(source, health=(column,)):
            continue
        for node, slow, readings, median_s in source.rows(
            f"""
            SELECT node, count(*) FILTER ({column} >= $1), count(*), median({column}) FILTER ({column} >= $1)
            FROM health WHERE device = 'host' GROUP BY node ORDER BY node
            """,
            [policy.disk_latency_s],
        ):
            if slow >= max(SHARED.min_steps, SHARED.explained_ratio * readings):
                worst[node] = max(worst.get(node, (0.0, 0.0, "")), (slow / readings, median_s, request))
    return [
        Finding.advise(
            "health",
            "host_pressure",
            f"A disk of host {node} took {1e3 * median_s:.0f} ms a {request} in {100 * ratio:.0f} % of the readings.",
            cause="disk_latency",
            evidence={"node": node, "device": "host", "request": request, "slow_ratio": ratio,
                      "latency_median_s": median_s},
            advice="host-pressure-disk_latency",
        )
        for node, (ratio, median_s, request) in sorted(worst.items())
    ]  # fmt: skip


def _links(node: str, errors: int | None, downs: int | None, policy: HealthPolicy) -> Iterator[Finding]:
    numbers = {"infiniband_errors": errors, "infiniband_downs": downs}
    if (downs or 0) >= 1:
        times = "once" if downs == 1 else f"{downs:,} times"
        what = f"An InfiniBand or RoCE port of host {node} lost or recovered its link {times} during this run."
        yield _finding("link_errors", "infiniband_down", node, what, numbers)
    elif (errors or 0) >= policy.many_errors:
        what = f"The InfiniBand or RoCE ports of host {node} counted {errors:,} errors during this run."
        yield _finding("link_errors", "infiniband", node, what, numbers)


def _tcp(node: str, resent: int | None, sent: int | None, policy: HealthPolicy) -> Iterator[Finding]:
    if resent is None or not sent or resent < policy.tcp_retransmits or resent < SHARED.min_gain_ratio * sent:
        return
    what = f"Host {node} retransmitted {100 * resent / sent:.1f} % of its TCP segments during this run."
    numbers = {"tcp_retransmits": resent, "tcp_segments": sent}
    yield _finding("link_errors", "tcp", node, what, numbers)


def _pressure(node: str, stopped_s: float | None, pressure: float | None, took_s: float) -> Iterator[Finding]:
    if stopped_s is not None and stopped_s >= SHARED.saving_ratio * took_s:
        what = f"The CPU limit of the container on host {node} stopped its processes for {stopped_s:.1f} s of this run."
        numbers = {"throttled_s": stopped_s, "throttled_ratio": stopped_s / took_s}
        yield _finding("host_pressure", "cpu_limit", node, what, numbers)
    if pressure is not None and pressure >= SHARED.cost_ratio:
        what = f"Processes on host {node} waited for memory {100 * pressure:.0f} % of the time."
        yield _finding("host_pressure", "memory", node, what, {"memory_pressure_ratio": pressure})


def _finding(kind: str, cause: str, node: str, summary: str, numbers: dict[str, Any]) -> Finding:
    return health_warning(kind, cause, summary, {"node": node, "device": "host", **numbers})


def health_warning(kind: str, cause: str, summary: str, evidence: dict[str, Any]) -> Finding:
    """Warning about a node or one of its devices; `kind` and `cause` select its section of the runbook."""
    return Finding(
        analyzer="health",
        kind=kind,
        severity="warning",
        status="fired",
        cause=cause,
        summary=summary,
        evidence=evidence,
        advice=f"{kind.replace('_', '-')}-{cause}",
    )
