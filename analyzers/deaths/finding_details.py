"""Details for the finding of a lost rank, read from the store: memory, XIDs, host, and the step it may have begun.

completed(source, finding)
"""

from __future__ import annotations

from dataclasses import replace

from analyzers.deaths.device_evidence import with_cuda_memory, with_xids
from analyzers.finding import Finding
from analyzers.source import Source

__all__ = ["AFTER_UPDATE", "completed"]

AFTER_UPDATE = "in user code after optimizer"


def completed(source: Source, finding: Finding) -> Finding:
    """Add evidence from the store that fits the finding's cause."""
    if finding.cause == "out_of_memory":
        return with_cuda_memory(source, _with_memory(source, finding))
    if finding.cause in ("exception", "signal"):
        return with_xids(source, _with_next_step(source, finding))
    if finding.cause == "node_failed":
        return _with_node_name(source, finding)
    return _with_host(source, finding) if finding.cause == "store_lost" else finding


def _with_next_step(source: Source, finding: Finding) -> Finding:
    """Mention the next step for a rank that was killed after an update: a loop without a data loader does not record
    the start of a step."""
    step = finding.first_step
    place = f"at step {step} {AFTER_UPDATE}"
    if finding.cause != "signal" or step is None or place not in finding.summary or not source.has("spans"):
        return finding
    if source.rows(
        "SELECT 1 FROM spans WHERE attempt = ? AND rank = ? AND kind = 'data' AND step BETWEEN ? AND ? LIMIT 1",
        [finding.attempt, finding.ranks[0], step - 1, step],
    ):
        return finding
    summary = finding.summary.replace(place, f"{place}, or as step {step + 1} began", 1)
    return replace(finding, summary=summary)


def _with_node_name(source: Source, finding: Finding) -> Finding:
    """Add the host that was the lost node in that attempt; a later attempt may use another machine."""
    node = finding.evidence["node_rank"]
    found = source.rows(
        "SELECT arg_max(host, wall_ns) FROM ranks WHERE attempt = ? AND node_rank = ?", [finding.attempt, node]
    )
    if not found or found[0][0] is None:
        return finding
    host = str(found[0][0])
    summary = finding.summary.replace(f"Node {node} was lost", f"Node {node} ({host}) was lost", 1)
    return replace(finding, summary=summary, evidence={**finding.evidence, "host": host})


def _with_host(source: Source, finding: Finding) -> Finding:
    """Add the host of rank 0: the rendezvous store runs in this rank or in its launcher."""
    found = source.rows(
        "SELECT arg_max(node_rank, wall_ns), arg_max(host, wall_ns) FROM ranks WHERE attempt = ? AND rank = 0",
        [finding.attempt],
    )
    node, host = found[0] if found else (None, None)
    if host is None:
        return finding
    summary = f"{finding.summary} It ran on node {node or 0}, {host}: in the launcher or in rank 0."
    return replace(finding, summary=summary, evidence={**finding.evidence, "store_node": node, "store_host": host})


def _with_memory(source: Source, finding: Finding) -> Finding:
    """Add the rank's first, last and highest memory, and the median of its peers in the last 50 steps: a leak grows
    over the steps, an uneven batch does not."""
    marks = ", ".join("?" * len(finding.ranks))
    ((first, last, highest, peers),) = source.rows(
        f"""
        SELECT arg_min(memory_bytes, start_ns) FILTER (own), arg_max(memory_bytes, start_ns) FILTER (own),
               max(memory_bytes) FILTER (own), CAST(median(memory_bytes) FILTER (NOT own AND step >= newest) AS BIGINT)
        FROM (SELECT *, rank IN ({marks}) AS own, max(step) OVER () - 50 AS newest FROM steps
              WHERE attempt = ? AND memory_bytes IS NOT NULL)
        """,
        [*finding.ranks, finding.attempt],
    )
    memory = {"memory_first_bytes": first, "memory_last_bytes": last, "memory_highest_bytes": highest}
    return replace(finding, evidence={**finding.evidence, **memory, "memory_of_peers_bytes": peers})
