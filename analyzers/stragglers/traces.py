"""Diagnosis of profiler traces: the parts of each rank's steps, and the ranks that are slower than their peers.

    findings, facts = judge_traces(survey(folder), name="traces")
    facts["trace"]["ranks"][3]      # {"rank": 3, "step_ms": 212.0, "compute_ms": ..., "exposed_ms": ...}

1. In each step's window: compute, communication, their overlap, communication that nothing hides (exposed), and idle
   (neither). Times of different ranks are never compared by clock, only by length.
2. A rank's own time is its step without exposed communication: a late rank waits little. It is judged as a step
   whose phases were not recorded (`stragglers.analyze`); peers are the ranks of one pipeline stage.
3. Of the exposed communication, what even the last to arrive sees is transfer; the rest is waiting for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from analyzers.account.timings import WHOLE_STEP, Matrix, Timings
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.source import Floats
from analyzers.stragglers.analyze import slow_ranks
from analyzers.stragglers.policy import StragglerPolicy
from analyzers.wording import ranks_text
from store.arrays import Ints
from store.readers.ascend_steps import is_ascend_steps, read_ascend_steps
from store.readers.confined import confined
from store.readers.external_files import NO_RANK, SourceError, Survey, head
from store.readers.intervals import intersection, overlap, union
from store.readers.kineto import RankTrace, read_trace
from store.readers.memory_store import MemoryStore
from store.readers.nsys import is_nsys, read_nsys

__all__ = ["MAX_LISTED", "breakdown", "judge_traces"]

MAX_LISTED = 4096
PARTS = ("step", "compute", "communication", "exposed", "idle", "data")


def judge_traces(found: Survey, *, name: str) -> tuple[list[Finding], dict[str, Any]]:
    """Findings of the traces, and facts for the report. What cannot be read is listed in `found.problems`."""
    by_rank: dict[int, tuple[RankTrace, dict[str, Floats]]] = {}
    unnamed: list[tuple[Path, str]] = []
    traces: list[RankTrace] = []
    for path in found.paths:
        try:
            traces.append(_read(path, is_only=len(found.paths) == 1))
        except SourceError as error:
            if str(error).startswith(NO_RANK):
                unnamed.append((path, str(error)))
            else:
                found.add_problem(path, str(error))
    if len(unnamed) == 1 and not traces:  # the others could not be read
        traces.append(_read(unnamed.pop()[0], is_only=True))
    for path, problem in unnamed:
        found.add_problem(path, problem)
    for trace in traces:
        path = trace.path
        if trace.problem:
            found.add_problem(path, f"{trace.problem}: read up to there ({trace.num_events:,} events)")
        if trace.damaged_events:
            found.add_problem(path, f"{trace.damaged_events:,} damaged events were left out")
        read = (trace, breakdown(trace))
        if trace.rank in by_rank:
            before = by_rank[trace.rank]
            if not (trace.marked and before[0].marked) or np.isin(trace.steps, before[0].steps).any():
                found.add_problem(path, f"is a second trace of rank {trace.rank}: {before[0].path.name} was read")
                continue
            read = _joined(before, read)
        by_rank[trace.rank] = read
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    findings = _findings(ranks) if ranks else [_insufficient("no trace could be read")]
    return findings, _facts(name, ranks)


def _read(path: Path, *, is_only: bool) -> RankTrace:
    is_steps = is_ascend_steps(head(path, 4096))
    read_one = read_ascend_steps if is_steps else read_nsys if is_nsys(path) else read_trace
    return confined(read_one, path, is_only=is_only)


def _joined(
    a: tuple[RankTrace, dict[str, Floats]], b: tuple[RankTrace, dict[str, Floats]]
) -> tuple[RankTrace, dict[str, Floats]]:
    """Two cycles of the profiler's schedule, each in a separate file, as one trace of more steps."""
    steps = np.concatenate([a[0].steps, b[0].steps])
    order = np.argsort(steps)
    parts = {part: np.concatenate([a[1][part], b[1][part]])[order] for part in PARTS}
    return replace(a[0], steps=steps[order]), parts


def breakdown(trace: RankTrace) -> dict[str, Floats]:
    """Milliseconds of each step: step, compute, communication, exposed, idle, data."""
    busy = union(*(np.concatenate(pair) for pair in zip(trace.compute, trace.communication, strict=True)))
    hidden = intersection(trace.communication, trace.compute)
    windows = (trace.begin_us, trace.end_us)
    step = trace.end_us - trace.begin_us
    communication = overlap(trace.communication, *windows)
    exposed = communication - overlap(hidden, *windows)
    idle = step - overlap(busy, *windows)
    data = overlap(trace.data, *windows)
    if trace.device != "cpu":  # loading costs the device only where it idles for it
        data = data - overlap(intersection(trace.data, busy), *windows)
    parts = dict(zip(PARTS, (step, overlap(trace.compute, *windows), communication, exposed, idle, data), strict=True))
    return {part: np.maximum(values, 0.0) / 1e3 for part, values in parts.items()}


def _findings(every: Sequence[tuple[RankTrace, dict[str, Floats]]]) -> list[Finding]:
    policy = StragglerPolicy()
    unmarked = [trace.rank for trace, _ in every if not trace.marked]
    if len(unmarked) == len(every):  # each whole trace is one step
        timings = _timings(every)
        why = f"no ProfilerStep# marks on {ranks_text(unmarked)}. Call prof.step() in the loop"
        return [_insufficient(why), *(_exposed(timings) if len(every) > 1 else ())]
    ranks = _comparable([read for read in every if read[0].marked], SHARED.min_steps)
    timings = _timings(ranks)
    with MemoryStore() as no_records:  # a trace has no calls, stacks or readings that would say more
        findings, _ = slow_ranks(no_records, timings, policy)
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


def _comparable(
    ranks: Sequence[tuple[RankTrace, dict[str, Floats]]], needed: int
) -> Sequence[tuple[RankTrace, dict[str, Floats]]]:
    """All traces, or where they share fewer than `needed` steps, those that have most of what the others have.

    A trace that is cut off would else leave nothing to compare.
    """
    steps, counts = np.unique(np.concatenate([trace.steps for trace, _ in ranks]), return_counts=True)
    usual = steps[2 * counts > len(ranks)]
    kept = sorted(ranks, key=lambda read: int(np.isin(usual, read[0].steps).sum()))
    while len(kept) > 2 and len(_common(kept)) < min(needed, len(usual)):
        kept = kept[1:]
    return sorted(kept, key=lambda read: read[0].rank)


def _common(ranks: Sequence[tuple[RankTrace, dict[str, Floats]]]) -> Ints:
    common = ranks[0][0].steps
    for trace, _ in ranks[1:]:
        common = np.intersect1d(common, trace.steps)
    return common


def _absent(ranks: Sequence[tuple[RankTrace, dict[str, Floats]]]) -> list[int]:
    world_size = max((trace.world_size or 0 for trace, _ in ranks), default=0)
    there = {trace.rank for trace, _ in ranks}
    return [rank for rank in range(min(world_size, 1_000_000)) if rank not in there]


def _timings(ranks: Sequence[tuple[RankTrace, dict[str, Floats]]]) -> Timings:
    """The steps that every rank has, as the straggler analyzer takes them."""
    common = _common(ranks)
    rows: dict[str, list[Any]] = {part: [] for part in PARTS}
    for trace, parts in ranks:
        at = np.searchsorted(trace.steps, common)
        for part in PARTS:
            rows[part].append(parts[part][at])
    matrix: dict[str, Matrix] = {part: np.array(values, dtype=np.float32) for part, values in rows.items()}
    # All that is neither data nor waiting: operators and kernels, and the host's time between them.
    work = np.maximum(matrix["step"] - matrix["exposed"] - matrix["data"], 0.0)
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
    transfer_ms = float(np.median(np.nanmin(timings.wait, axis=0)))
    step_ms = float(np.nanmedian(timings.duration))
    if step_ms <= 0 or transfer_ms < SHARED.cost_ratio * step_ms:
        return []
    return [
        Finding.advise(
            "communication",
            "exposed_communication",
            f"Communication that no compute hides takes {100 * transfer_ms / step_ms:.0f} % of a step "
            f"({transfer_ms:.3g} of {step_ms:.3g} ms), even on the rank that waits least.",
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


def _facts(name: str, ranks: Sequence[tuple[RankTrace, dict[str, Floats]]]) -> dict[str, Any]:
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
        "run_id": name,
        "num_ranks": len(ranks),
        "devices": sorted({trace.device for trace, _ in ranks}),
        "steps": max((len(trace.steps) for trace, _ in ranks), default=None),
        "step_ms_median": round(float(np.median(steps)), 3) if len(steps) else None,
        "ended": "not in the traces",
        "trace": {"ranks": rows},
    }


_insufficient = partial(Finding.not_judged, "straggler", "straggler", "Ranks were not compared")
_in_part = partial(Finding.not_judged, "straggler", "straggler", "Ranks were not compared in full", in_part=True)
