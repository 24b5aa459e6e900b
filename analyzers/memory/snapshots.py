"""Diagnosis of snapshots of CUDA memory: what was in use when an allocation failed.

failed_allocations(read_memory_snapshots(survey(folder)))

The snapshot's trace contains a failed allocation, but does not show whether this ended the process, so the finding is a
suspicion. A snapshot without a failed allocation was taken at another time: its content is listed, and nothing is
judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analyzers.analysis import FileAnalysis
from analyzers.finding import Finding
from analyzers.memory.snapshot_text import site_text, snapshot_evidence
from analyzers.wording import size_text
from store.readers.memory_snapshot import read_memory_snapshots

__all__ = ["FILES", "failed_allocations"]

MAX_LISTED = 4096
Snapshot = dict[str, Any]


def failed_allocations(snapshots: Sequence[Snapshot]) -> list[Finding]:
    """A suspicion for each snapshot of a failed allocation; for the others, what they contain."""
    if not snapshots:
        return [Finding.insufficient("memory", "memory_limit", "No memory snapshot could be read.")]
    return [
        _failed(one["rank"], one["device"], _evidence(one)) if one["is_at_failure"] else _no_failure(one["path"], one)
        for one in snapshots
    ]


def _evidence(about: Snapshot) -> dict[str, Any]:
    unused = max(0, about["reserved_bytes"] - about["allocated_bytes"])
    return {**snapshot_evidence(about, unused_bytes=unused), "memory_snapshot": about["path"]}


def _facts(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    listed = [
        {"path": one["path"], "rank": one["rank"], "device": one["device"], **_evidence(one)}
        for one in snapshots[:MAX_LISTED]
    ]
    return {"num_ranks": None, "ended": "not in the memory snapshots", "memory_snapshots": listed}


def _failed(rank: int | None, device: int, evidence: dict[str, Any]) -> Finding:
    who = f"A process on CUDA device {device}" if rank is None else f"Rank {rank}"
    at = f" ({evidence['asked_at']})" if evidence["asked_at"] else ""
    return Finding(
        analyzer="memory",
        kind="rank_lost",
        severity="critical",
        status="suspect",
        ranks=() if rank is None else (rank,),
        cause="out_of_memory",
        summary=f"{who} ran out of memory: it asked for {size_text(evidence['requested_bytes'])}{at}.",
        evidence=evidence,
        advice="rank-lost-out_of_memory",
    )


def _no_failure(name: str, about: Snapshot) -> Finding:
    sites = about["sites"]
    most = f", most of it {site_text(sites[0])}" if sites and about["has_stacks"] else ""
    return Finding.insufficient(
        "memory",
        "memory_limit",
        f"{name} shows no allocation that failed: {size_text(about['allocated_bytes'])} of "
        f"{size_text(about['reserved_bytes'])} reserved were in use{most}.",
    )


FILES = FileAnalysis(
    format="memory_snapshot", kind="memory_limit", read=read_memory_snapshots, run=failed_allocations, facts=_facts
)
