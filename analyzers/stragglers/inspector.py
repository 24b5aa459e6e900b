"""Diagnosis of the inspector's files: the rank that the others wait for.

findings, facts = judge_inspector(survey, name="nccl-inspector-771")

1. Of one collective the rank with the shortest time came last; the others waited the difference to it.
2. A rank that comes last in most collectives of a communicator, and for which the others wait a good part of their
   time in them, is suspected: why it is late is not in these files.
3. Ranks are those of the largest communicator; a process has the same rank in all of them.
4. The files have lengths and no times, so their calls are no rows of `collectives`, which say when a call was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.source import Floats, Ints
from analyzers.stragglers.policy import InspectorPolicy
from analyzers.stragglers.traces import MAX_LISTED
from store.readers.confined import confined
from store.readers.external_files import SourceError, Survey
from store.readers.inspector import InspectedCalls, read_inspector

__all__ = ["judge_inspector"]

Calls = dict[int, InspectedCalls]


def judge_inspector(found: Survey, *, name: str) -> tuple[list[Finding], dict[str, Any]]:
    """Findings of the files, and facts for the report. What cannot be read is listed in `found.problems`."""
    groups: dict[str, Calls] = {}
    for path in found.paths:
        try:
            log = confined(read_inspector, path)
        except SourceError as error:
            found.add_problem(path, str(error))
            continue
        if log.problem or log.damaged_lines:
            found.add_problem(path, log.problem or f"{log.damaged_lines:,} damaged lines were left out")
        for (group, rank), calls in log.calls.items():
            groups.setdefault(group, {})[rank] = calls
    if not groups:
        return [_insufficient("no collective could be read")], {"run_id": name}
    largest = max(groups.values(), key=_size)
    ranks_of = {calls.process: rank for rank, calls in largest.items()}
    findings = [one for members in groups.values() if (one := _late(members, ranks_of)) is not None]
    worst = sorted(findings, key=lambda finding: -float(finding.cost_s or 0.0))[:1]
    size = max((calls.num_ranks for calls in largest.values()), default=len(largest))
    facts = {
        "run_id": name,
        "num_ranks": size,
        "ended": "not in the inspector's files",
        "inspector": {
            "communicators": len(groups),
            "last_completed": {str(rank): int(calls.seq.max()) for rank, calls in sorted(largest.items())[:MAX_LISTED]},
        },
    }
    unjudged = _unjudged(groups)
    if len(largest) < size and not unjudged:
        unjudged = [_in_part(f"files of {len(largest)} of {size} ranks are there")]
    return [*worst, *unjudged], facts


def _size(members: Calls) -> tuple[int, int]:
    return max(calls.num_ranks for calls in members.values()), len(members)


def _unjudged(groups: Mapping[str, Calls]) -> list[Finding]:
    policy = InspectorPolicy()
    if all(len(_common(members)[0]) < policy.min_calls for members in groups.values()):
        there = sum(len(members) for members in groups.values())
        if there == len(groups):
            return [_insufficient("the files are of one rank, and late is a rank only against others")]
        return [_insufficient(f"no communicator has {policy.min_calls} collectives that all its ranks completed")]
    return []


def _common(members: Calls) -> tuple[Ints, Floats]:
    """Sequence numbers that all members have, and times, rank by call."""
    rows = [dict(zip(calls.seq.tolist(), calls.exec_us.tolist(), strict=True)) for _, calls in sorted(members.items())]
    common = sorted(set.intersection(*(set(row) for row in rows))) if len(rows) > 1 else []
    times = np.array([[row[seq] for seq in common] for row in rows], dtype=np.float64).reshape(len(rows), len(common))
    return np.array(common, dtype=np.int64), times


def _late(
    members: Calls, ranks_of: Mapping[tuple[str, int], int], policy: InspectorPolicy | None = None
) -> Finding | None:
    policy = policy or InspectorPolicy()
    common, times = _common(members)
    if len(common) < policy.min_calls:
        return None
    last = times.argmin(axis=0)
    place = int(np.bincount(last, minlength=len(times)).argmax())
    is_last = last == place
    others = np.delete(times, place, axis=0)
    waited_us = np.where(is_last, others - times[place], 0.0)
    wait_ratio = float(waited_us.sum() / max(others.sum(), 1.0))
    last_ratio = float(is_last.mean())
    rank = ranks_of.get(members[sorted(members)[place]].process)
    if rank is None or last_ratio < SHARED.explained_ratio or wait_ratio < SHARED.severe_share_ratio:
        return None
    median_ms = float(np.median(waited_us[:, is_last])) / 1e3
    return Finding(
        analyzer="straggler",
        kind="straggler",
        severity="warning",
        status="suspect",
        ranks=(rank,),
        cause="unknown",
        summary=f"Rank {rank} was the last to enter {last_ratio:.0%} of {len(common):,} collectives: the other ranks "
        f"waited {median_ms:.3g} ms for it in each. Why it is late is not in these files.",
        evidence={
            "arrives_last_ratio": round(last_ratio, 3),
            "caused_wait_ratio": round(wait_ratio, 3),
            "collectives_checked": len(common),
            "peers_wait_more_ms": round(median_ms, 3),
            "ranks_in_group": len(members),
        },
        advice="straggler-compute",
        cost_s=round(float(waited_us.max(axis=0).sum()) / 1e6, 3),
    )


_insufficient = partial(Finding.not_judged, "straggler", "straggler", "Late ranks were not checked")
_in_part = partial(Finding.not_judged, "straggler", "straggler", "Late ranks were not fully checked", in_part=True)
