"""Idle time of pipeline ranks, from the spans of what they computed.

    for step in measure_idle(PipelineSpans(rank=..., step=..., stage=..., ...), ranks=[0, 1, 2, 3]):
        step.idle_ratio                                     # of all ranks together: the bubble
        step.ranks[3].idle_ratio                            # of one
    expected_idle("1f1b", ranks=4, microbatches=8)          # 0.2727...

*Bubble* here is the **idle share of the total**: of the time from a pipeline's first forward to its last backward, the
share in which a rank computes nothing, averaged over the ranks. Megatron's "bubble fraction" relates the same idle
time to the ideal one instead; `idle / (1 - idle)` turns ours into theirs.

Only differences of times of one rank are used, so ranks' clocks need not agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analyzers.source import Ints

__all__ = [
    "COMPUTATIONS", "PipelineSpans", "RankIdle", "StepIdle", "expected_idle", "idle_of", "measure_idle", "whole_steps",
]  # fmt: skip

COMPUTATIONS = ("forward", "loss", "backward", "weight")
"""Kinds of spans in which a stage computes. What it waits for inside one (tensor parallel, FSDP) counts as work: other
ranks of the stage, not its neighbours in the pipeline, are to blame for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpans:
    """Columns of table `spans` of one attempt, one element per span: those with a stage, or more."""

    rank: Ints
    step: Ints
    stage: Ints  # negative: none
    microbatch: Ints
    kind: Sequence[str] | npt.NDArray[np.object_]
    start_ns: Ints
    end_ns: Ints  # negative, or before `start_ns`: still open


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdle:
    """One rank in one step."""

    busy_ns: int
    idle_ratio: float  # 1 - busy / the pipeline's time
    busy_ns_by_stage: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIdle:
    """One step of one pipeline."""

    step: int
    total_ns: int  # from the first forward to the last backward
    idle_ratio: float  # mean over the ranks
    ranks: Mapping[int, RankIdle]


def expected_idle(
    schedule: str,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    times: tuple[float, float, float] | None = None,
) -> float | None:
    """Idle share of the total with equal stages and free communication; None for schedules without a closed form.

    gpipe, 1f1b: (p - 1) / (m + p - 1) (Huang et al. 2019). interleaved_1f1b: (p - 1) / (v m + p - 1) with v stages a
    rank (Narayanan et al. 2021, there as (p - 1) / (v m) of the ideal time). interleaved_zero_bubble, with `times` of a
    forward F, a backward of inputs B and one of weights W of a stage (any unit): (p - 1) (F + B - W) of idle time to
    v m (F + B + W) of work (ZB-H1 of Qi et al. 2023, "Zero Bubble Pipeline Parallelism", which torch calls ZB1P); it
    holds up to W = F. zbv_zero_bubble is free of idle time at F = B = W and has no closed form otherwise.
    """
    if schedule in ("gpipe", "1f1b"):
        return (ranks - 1) / (microbatches + ranks - 1)
    if schedule == "interleaved_1f1b":
        return (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
    if schedule == "interleaved_zero_bubble" and times is not None:
        forward, backward, weight = times
        if 0 < weight <= forward:
            idle = (ranks - 1) * (forward + backward - weight)
            return idle / (stages_per_rank * microbatches * (forward + backward + weight) + idle)
    return None


def measure_idle(spans: PipelineSpans, ranks: Sequence[int]) -> list[StepIdle]:
    """Idle time of the pipeline that `ranks` form, in each step that all of them have finished, in the order run.

    1. In each execution of a step (`whole_steps`) the pipeline's time is the longest of the ranks' own, from the start
       of its first span to the end of its last: the rank with the first stage begins first, and its last backward is
       the last of all.
    2. A rank's busy time is the sum of its spans, which never overlap on one rank; the rest is idle.
    """
    return [idle_of(one, ranks) for one in whole_steps(spans, ranks)]


def whole_steps(spans: PipelineSpans, ranks: Sequence[int]) -> list[PipelineSpans]:
    """The closed computations of each execution of a step that all `ranks` have finished, in the order run.

    A step that ran again after a rollback is told apart by how often its rank has computed the same microbatch of the
    same stage before. A step that a rank lacks, or in which not every microbatch went forward and back on every rank
    (it was cut off, or records were dropped), is left out.
    """
    kinds = np.asarray(spans.kind, dtype=object)
    keep = np.isin(kinds.astype(str), COMPUTATIONS) & (spans.stage >= 0) & (spans.end_ns >= spans.start_ns)
    keep &= np.isin(spans.rank, np.asarray(ranks))
    rank, step, stage = spans.rank[keep], spans.step[keep], spans.stage[keep]
    start, end = spans.start_ns[keep], spans.end_ns[keep]
    if not len(rank):
        return []
    microbatch, kind = spans.microbatch[keep], kinds[keep].astype(str)
    turn = _turns(rank, step, stage, microbatch, kind, start)

    order = np.lexsort((start, turn, step))
    bounds = np.flatnonzero((np.diff(step[order]) != 0) | (np.diff(turn[order]) != 0)) + 1
    found: list[tuple[int, PipelineSpans]] = []
    for rows in np.split(order, bounds):
        own = [rows[rank[rows] == r] for r in ranks]
        if not _is_whole([Counter(zip(kind[of], microbatch[of], strict=True)) for of in own]):
            continue
        one = PipelineSpans(
            rank=rank[rows], step=step[rows], stage=stage[rows], microbatch=microbatch[rows], kind=kind[rows],
            start_ns=start[rows], end_ns=end[rows],
        )  # fmt: skip
        found.append((int(start[own[0]].min()), one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def idle_of(one: PipelineSpans, ranks: Sequence[int], loading_ns: Mapping[int, int] | None = None) -> StepIdle:
    """Idle time of one execution of a step, an element of `whole_steps`.

    `loading_ns`: how long each rank loaded its batch. The pipeline's time then begins where the rank of the first stage
    begins to load: no rank can compute before it has.
    """
    own = {rank: np.flatnonzero(one.rank == rank) for rank in ranks}
    first = int(one.rank[np.argmin(one.stage)])
    windows = {r: int(one.end_ns[of].max() - one.start_ns[of].min()) for r, of in own.items()}
    windows[first] += (loading_ns or {}).get(first, 0)
    total = max(windows.values())
    by_rank = {r: _rank_idle(of, total, one.stage, one.start_ns, one.end_ns) for r, of in own.items()}
    mean = sum(rank.idle_ratio for rank in by_rank.values()) / len(by_rank)
    return StepIdle(step=int(one.step[0]), total_ns=total, idle_ratio=mean, ranks=by_rank)


def _is_whole(done: list[Counter[tuple[str, int]]]) -> bool:
    """Return True if every rank has run forward and backward for the same microbatches."""
    forward = [{number for kind, number in one if kind == "forward"} for one in done]
    if not forward[0] or any(numbers != forward[0] for numbers in forward):
        return False
    return all(one["forward", number] == one["backward", number] for one in done for number in forward[0])


def _rank_idle(rows: Ints, total_ns: int, stage: Ints, start: Ints, end: Ints) -> RankIdle:
    took = end[rows] - start[rows]
    busy = int(took.sum())
    return RankIdle(
        busy_ns=busy,
        idle_ratio=1 - busy / total_ns if total_ns else 0.0,
        busy_ns_by_stage={int(s): int(took[stage[rows] == s].sum()) for s in np.unique(stage[rows])},
    )


def _turns(rank: Ints, step: Ints, stage: Ints, microbatch: Ints, kind: npt.NDArray[np.str_], start: Ints) -> Ints:
    """Number of earlier executions of the same work by the same rank in the same step, for each span."""
    number = np.unique(kind, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((start, number, microbatch, stage, step, rank))
    same = np.ones(len(order), dtype=bool)
    same[0] = False
    for column in (rank, step, stage, microbatch, number):
        same[1:] &= column[order][1:] == column[order][:-1]
    position = np.arange(len(order))
    first = np.maximum.accumulate(np.where(same, 0, position))
    turns = np.empty(len(order), dtype=np.int64)
    turns[order] = position - first
    return turns
