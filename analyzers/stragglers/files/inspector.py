"""Diagnosis of files of NCCL's inspector: the rank for which the others wait.

late_ranks(read_inspector_job(survey(folder)))

1. In each collective the rank with the shortest time arrived last; each other rank waited for the difference
   (`arrivals`).
2. A rank is suspected if it arrives last in most collectives of a communicator, and if the others wait for it during a
   large part of their time in these. The files do not show why it is late.
3. The files have durations but no times, so their calls are judged in a separate store and not together with a run's
   calls.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from analyzers.analysis import FileAnalysis
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.stragglers.comparison.arrivals import LastRank, last_ranks
from analyzers.stragglers.policy import InspectorPolicy
from analyzers.wording import number
from store.readers.inspector import InspectedJob, read_inspector_job
from store.readers.memory_store import MemoryStore

__all__ = ["FILES", "late_ranks"]

MAX_LISTED = 4096


def late_ranks(job: InspectedJob, policy: InspectorPolicy | None = None) -> list[Finding]:
    """The late rank that caused the most waiting in any communicator, and the checks that were not made."""
    policy = policy or InspectorPolicy()
    if not job.groups:
        return [_insufficient("no collective could be read")]
    with MemoryStore() as store:
        store.add_columns("collectives", job.columns())
        judged = [one for one in last_ranks(store) if one.arrivals.num_checked >= policy.min_calls]
    if not judged:
        if all(len(members) == 1 for members in job.groups.values()):
            return [_insufficient("the files are from one rank, and lateness is relative to other ranks")]
        return [_insufficient(f"no communicator has {policy.min_calls} collectives that all its ranks completed")]
    findings = [_finding(one) for one in sorted(judged, key=lambda one: -one.lost_s) if _is_late(one)][:1]
    if len(job.largest) < job.num_ranks:
        findings.append(_in_part(f"only {len(job.largest)} of {job.num_ranks} ranks have files"))
    return findings


def _is_late(one: LastRank) -> bool:
    last_ratio = one.arrivals.num_last / one.arrivals.num_checked
    return last_ratio >= SHARED.explained_ratio and one.wait_ratio >= SHARED.severe_share_ratio


def _finding(one: LastRank) -> Finding:
    last_ratio, checked = one.arrivals.num_last / one.arrivals.num_checked, one.arrivals.num_checked
    return Finding(
        analyzer="straggler",
        kind="straggler",
        severity="warning",
        status="suspect",
        ranks=(one.rank,),
        cause="unknown",
        summary=f"Rank {one.rank} was the last to enter {last_ratio:.0%} of {checked:,} collectives: the other ranks "
        f"waited {number(one.median_wait_ms)} ms for it in each. These files do not show why it is late.",
        evidence={
            **one.arrivals.evidence(),
            "peers_wait_more_ms": round(one.median_wait_ms, 3),
            "ranks_in_group": one.num_ranks,
        },
        advice="straggler-compute",
        cost_s=round(one.lost_s, 3),
    )


def _facts(job: InspectedJob) -> dict[str, Any]:
    if not job.groups:
        return {}
    last = {str(rank): int(calls.seq.max()) for rank, calls in sorted(job.largest.items())[:MAX_LISTED]}
    return {
        "num_ranks": job.num_ranks,
        "ended": "not in the inspector's files",
        "inspector": {"communicators": len(job.groups), "last_completed": last},
    }


_insufficient = partial(Finding.not_judged, "straggler", "straggler", "Late ranks were not checked")
_in_part = partial(Finding.not_judged, "straggler", "straggler", "Late ranks were not fully checked", in_part=True)
FILES = FileAnalysis(format="inspector", kind="straggler", read=read_inspector_job, run=late_ranks, facts=_facts)
