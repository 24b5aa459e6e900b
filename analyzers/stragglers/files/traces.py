"""Diagnosis of profiler traces: the parts of each rank's steps, and the ranks that are slower than their peers.

    findings = slow_ranks_of_traces(read_rank_traces(survey(folder)))

1. Times of different ranks are never compared by clock, only by length (`store.readers.traces.rank_traces`).
2. A rank's own time is its step without exposed communication: a late rank waits little. It is judged like a step
   without recorded phases (`stragglers.analyze`); peers are the ranks of one pipeline stage. If all steps together are
   so short that another job on the host could have slowed them all, they are judged by their kernels, because such a
   job does not slow kernels. On a CPU, a rank that is slower in such steps is reported as not judged. Traces are not
   rows of `steps`, which hold phases by the host's clock; a trace holds the work of the device.
3. The least exposed communication of any rank is transfer, because the rank that arrives last does not wait; the rest
   is waiting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from analyzers.account.timings import WHOLE_STEP, Matrix, Timings
from analyzers.analysis import FileAnalysis
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.stragglers.analyze import slow_ranks
from analyzers.stragglers.policy import StragglerPolicy
from analyzers.wording import number, ranks_text
from store.arrays import Ints
from store.readers.memory_store import MemoryStore
from store.readers.traces.rank_traces import PARTS, Steps, read_rank_traces

__all__ = ["FILES", "slow_ranks_of_traces"]

MAX_LISTED = 4096


def slow_ranks_of_traces(every: Sequence[Steps]) -> list[Finding]:
    """Findings on ranks that are slower than their peers, on exposed communication, and on what was not compared."""
    if not every:
        return [_insufficient("no trace could be read")]
    policy = StragglerPolicy()
    unmarked = [trace.rank for trace, _ in every if not trace.marked]
    if len(unmarked) == len(every):  # no trace has step marks, so each trace counts as one step
        timings = _timings(every)
        why = f"no ProfilerStep# marks on {ranks_text(unmarked)}. Call prof.step() in the loop"
        return [_insufficient(why), *(_exposed(timings) if len(every) > 1 else ())]
    ranks = _comparable([read for read in every if read[0].marked], SHARED.min_steps)
    timings = _timings(ranks)
    with MemoryStore() as no_records:  # a trace holds no calls, stacks or readings that could be further evidence
        findings, _ = slow_ranks(no_records, timings, policy)
        if not findings and all(trace.device != "cpu" for trace, _ in ranks):
            on_device = _timings(ranks, is_device_only=True)
            findings, _ = slow_ranks(no_records, on_device, replace(policy, burst_step_s=0.0))
        if not findings:
            findings = [
                _insufficient(_too_short(one, timings, policy))
                for one in slow_ranks(no_records, timings, replace(policy, burst_step_s=0.0))[0]
            ]
    if len(ranks) > 1:
        findings += _exposed(timings)
    remark = _in_part
    if not any(len(peers) > 1 for peers in timings.peers):
        remark = _insufficient
        findings.append(_insufficient("traces of two ranks with the same work are needed"))
    elif len(timings.steps) < SHARED.min_steps:
        remark, few, needed = _insufficient, len(timings.steps), SHARED.min_steps
        steps = "only 1 step is" if few == 1 else f"only {few} steps are" if few else "no step is"
        findings.append(_insufficient(f"{steps} in all traces. Record {needed} with schedule(active={needed})"))
    compared = {trace.rank for trace, _ in ranks}
    if short := [trace.rank for trace, _ in every if trace.marked and trace.rank not in compared]:
        findings.append(remark(f"the traces of {ranks_text(short)} lack most steps of the others"))
    if unmarked:
        findings.append(remark(f"no ProfilerStep# marks on {ranks_text(unmarked)}"))
    if absent := _absent(every):
        findings.append(remark(f"there is no trace of {ranks_text(absent)}"))
    return findings


def _too_short(found: Finding, timings: Timings, policy: StragglerPolicy) -> str:
    """Reason why a rank that is slower in all of a few short steps is not named as slow."""
    step_s = float(np.median(timings.duration)) / 1e3
    least_s = SHARED.min_steps * policy.burst_step_s
    return (
        f"{ranks_text(found.ranks)} took {found.evidence['factor_ratio']:.2f}x as long as the others, but the "
        f"{len(timings.steps)} steps last {len(timings.steps) * step_s:.2g} s, and another job on the host may slow "
        f"a rank for that long. Record {least_s:.2g} s or more: schedule(active={math.ceil(least_s / step_s)})"
    )


def _comparable(ranks: Sequence[Steps], needed: int) -> Sequence[Steps]:
    """Return all traces. If they share fewer than `needed` steps, return only the traces that have most of the steps.

    Otherwise one truncated trace would leave nothing to compare.
    """
    steps, counts = np.unique(np.concatenate([trace.steps for trace, _ in ranks]), return_counts=True)
    usual = steps[2 * counts > len(ranks)]
    kept = sorted(ranks, key=lambda read: int(np.isin(usual, read[0].steps).sum()))
    while len(kept) > 2 and len(_common(kept)) < min(needed, len(usual)):
        kept = kept[1:]
    return sorted(kept, key=lambda read: read[0].rank)


def _common(ranks: Sequence[Steps]) -> Ints:
    common = ranks[0][0].steps
    for trace, _ in ranks[1:]:
        common = np.intersect1d(common, trace.steps)
    return common


def _absent(ranks: Sequence[Steps]) -> list[int]:
    world_size = max((trace.world_size or 0 for trace, _ in ranks), default=0)
    present = {trace.rank for trace, _ in ranks}
    return [rank for rank in range(min(world_size, 1_000_000)) if rank not in present]


def _timings(ranks: Sequence[Steps], *, is_device_only: bool = False) -> Timings:
    """The steps that all ranks have, as `Timings` for the straggler analyzer: all own work, or the device's only."""
    common = _common(ranks)
    rows: dict[str, list[Any]] = {part: [] for part in PARTS}
    for trace, parts in ranks:
        at = np.searchsorted(trace.steps, common)
        for part in PARTS:
            rows[part].append(parts[part][at])
    matrix: dict[str, Matrix] = {part: np.array(values, dtype=np.float32) for part, values in rows.items()}
    # The rest of the step after data and waiting: operators, kernels and the host's time between them.
    work = np.maximum(matrix["step"] - matrix["exposed"] - matrix["data"], 0.0)
    work = matrix["compute"] + matrix["copies"] if is_device_only else work
    stages = np.array([trace.stage for trace, _ in ranks])
    return Timings(
        attempt=0,
        ranks=np.array([trace.rank for trace, _ in ranks]),
        steps=common,
        own={"data": matrix["data"], WHOLE_STEP: work},
        wait=matrix["exposed"],
        duration=matrix["step"],
        peers=tuple(np.flatnonzero(stages == stage) for stage in np.unique(stages)),
    )


def _exposed(timings: Timings) -> list[Finding]:
    if not len(timings.steps):
        return []
    transfer_ms = float(np.median(np.min(timings.wait, axis=0)))
    step_ms = float(np.median(timings.duration))
    if step_ms <= 0 or transfer_ms < SHARED.cost_ratio * step_ms:
        return []
    return [
        Finding.advise(
            "communication",
            "exposed_communication",
            f"Exposed communication takes {100 * transfer_ms / step_ms:.0f} % of a step "
            f"({number(transfer_ms)} of {number(step_ms)} ms), even on the rank that waits least.",
            first_step=int(timings.steps[0]),
            last_step=int(timings.steps[-1]),
            cause="transfer",
            evidence={
                "exposed_ms": round(transfer_ms, 3),
                "step_ms": round(step_ms, 3),
                "exposed_ratio": round(transfer_ms / step_ms, 3),
            },
        )
    ]


def _facts(ranks: Sequence[Steps]) -> dict[str, Any]:
    rows = []
    for trace, parts in ranks[:MAX_LISTED]:
        means = {f"{part}_ms": round(float(np.mean(parts[part])), 4) for part in PARTS}
        communication = float(np.sum(parts["communication"]))
        hidden = 1.0 - float(np.sum(parts["exposed"])) / communication if communication else None
        rows.append(
            {"rank": trace.rank, "device": trace.device, "steps": len(trace.steps), **means}
            | {"overlap_ratio": None if hidden is None else round(hidden, 4)}
        )
    steps = np.concatenate([parts["step"] for _, parts in ranks]) if ranks else np.zeros(0)
    return {
        "num_ranks": len(ranks),
        "devices": sorted({trace.device for trace, _ in ranks}),
        "steps": max((len(trace.steps) for trace, _ in ranks), default=None),
        "step_ms_median": round(float(np.median(steps)), 3) if len(steps) else None,
        "ended": "not in the traces",
        "trace": {"ranks": rows},
    }


_insufficient = partial(Finding.not_judged, "straggler", "straggler", "Ranks were not compared")
_in_part = partial(Finding.not_judged, "straggler", "straggler", "Ranks were not compared in full", in_part=True)
FILES = FileAnalysis(format="kineto", kind="straggler", read=read_rank_traces, run=slow_ranks_of_traces, facts=_facts)
