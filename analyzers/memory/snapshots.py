"""Diagnosis of snapshots of CUDA memory: what was in use when an allocation failed.

findings, facts = judge_memory(survey, name="rank3.pickle")

A failed allocation is in the snapshot's trace; whether its process ended of it is not, so that is suspected. Without
one the snapshot is of some moment: what it shows is listed, and nothing is judged.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from analyzers.finding import Finding
from analyzers.memory.snapshot_text import site_text, snapshot_evidence
from analyzers.wording import size_text
from store.readers.confined import confined
from store.readers.external_files import SourceError, Survey, rank_of_name
from store.readers.memory_snapshot import read_memory_snapshot

__all__ = ["judge_memory"]

MAX_LISTED = 4096
Shown = dict[str, Any]


def judge_memory(found: Survey, *, name: str) -> tuple[list[Finding], dict[str, Any]]:
    """Findings of the snapshots, and facts for the report. What cannot be read is listed in `found.problems`."""
    findings, shown = [], []
    for path in found.paths:
        try:
            read = confined(read_memory_snapshot, path)
        except SourceError as error:
            found.add_problem(path, str(error))
            continue
        if read.problem:
            found.add_problem(path, read.problem)
        state = read.state
        about = asdict(state)
        rank, unused = rank_of_name(path), max(0, state.reserved_bytes - state.allocated_bytes)
        evidence = {**snapshot_evidence(about, unused_bytes=unused), "memory_snapshot": path.name}
        shown.append({"path": path.name, "rank": rank, "device": state.device, **evidence})
        findings.append(_failed(rank, state.device, evidence) if state.is_at_failure else _no_failure(path.name, about))
    if not findings:
        findings = [Finding.insufficient("memory", "memory_limit", "No memory snapshot could be read.")]
    facts = {
        "run_id": name,
        "num_ranks": None,
        "ended": "not in the memory snapshots",
        "memory_snapshots": shown[:MAX_LISTED],
    }
    return findings, facts


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


def _no_failure(name: str, about: Shown) -> Finding:
    sites = about["sites"]
    most = f", most of it {site_text(sites[0])}" if sites and about["has_stacks"] else ""
    return Finding.insufficient(
        "memory",
        "memory_limit",
        f"{name} shows no allocation that failed: {size_text(about['allocated_bytes'])} of "
        f"{size_text(about['reserved_bytes'])} reserved were in use{most}.",
    )
