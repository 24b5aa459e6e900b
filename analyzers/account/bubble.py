"""Idle time of pipeline ranks, from their computation spans.

    for step in measure_idle(PipelineSpans(rank=..., step=..., stage=..., ...), ranks=[0, 1, 2, 3]):
        step.idle_ratio                                     # mean over the ranks: the bubble
        step.ranks[3].idle_ratio                            # rank 3 alone
    expected_idle("1f1b", ranks=4, microbatches=8)          # 0.2727...

*Bubble* here is the **idle share of the total**: the share of a pipeline's time, from its first forward to its last
backward, in which a rank computes nothing, averaged over the ranks. Megatron's "bubble fraction" divides the idle time
by the ideal time instead; `idle / (1 - idle)` converts the share here to that fraction.

Times of different ranks are never subtracted, so their clocks need not agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analyzers.source import Ints

__all__ = [
    "COMPUTATIONS", "PipelineSpans", "RankIdle", "StepIdle", "complete_steps", "expected_idle", "measure_idle",
    "step_idle",
]  # fmt: skip

COMPUTATIONS = ("forward", "loss", "backward", "weight")
"""Kinds of spans in which a stage computes. Waiting inside one (tensor parallel, FSDP) counts as work: it is caused by
other ranks of the same stage, not by neighbouring stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpans:
    """Columns of table `spans` of one attempt, one element per span; spans without a stage are ignored."""

    rank: Ints
    step: Ints
    stage: Ints  # negative for work that belongs to no stage
    microbatch: Ints
    kind: Sequence[str] | npt.NDArray[np.object_]
    start_ns: Ints
    end_ns: Ints  # negative, or smaller than `start_ns`, while the work is still open


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

    With p ranks, m microbatches and v stages per rank:

    * gpipe, 1f1b: (p - 1) / (m + p - 1) (Huang et al. 2019).
    * interleaved_1f1b: (p - 1) / (v m + p - 1) (Narayanan et al. 2021, who give (p - 1) / (v m) of the ideal time).
    * interleaved_zero_bubble: I / (I + v m (F + B + W)) with I = (p - 1) (F + B - W), for W <= F. `times` are a stage's
      forward F, input backward B and weight backward W in any unit (ZB-H1 of Qi et al. 2023, torch's ZB1P).
    * zbv_zero_bubble: no idle time at F = B = W, otherwise no closed form.
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
    """Idle time of the pipeline formed by `ranks`, for each step that all of them completed, in execution order.

    1. A rank's time in an execution of a step (`complete_steps`) lasts from the start of its first span to the end of
       its last one. The longest of these is the pipeline's time: the first stage starts first and ends last.
    2. A rank's busy time is the sum of its spans, which never overlap on one rank; the rest is idle.
    """
    return [step_idle(step, ranks) for step in complete_steps(spans, ranks)]


def complete_steps(spans: PipelineSpans, ranks: Sequence[int]) -> list[PipelineSpans]:
    """The closed computations of each execution of a step that all `ranks` completed, in execution order.

    A step may run again after a rollback. A span belongs to execution n if n earlier spans have the same rank, step,
    stage, microbatch and kind. An execution is skipped if it is incomplete, because the step was interrupted or records
    were dropped: a rank has no span of it, or a microbatch has no forward or backward on some rank.
    """
    kinds = np.asarray(spans.kind, dtype=object)
    keep = np.isin(kinds.astype(str), COMPUTATIONS) & (spans.stage >= 0) & (spans.end_ns >= spans.start_ns)
    keep &= np.isin(spans.rank, np.asarray(ranks))
    rank, step, stage = spans.rank[keep], spans.step[keep], spans.stage[keep]
    start, end = spans.start_ns[keep], spans.end_ns[keep]
    if not len(rank):
        return []
    microbatch, kind = spans.microbatch[keep], kinds[keep].astype(str)
    execution = _executions(rank, step, stage, microbatch, kind, start)

    order = np.lexsort((start, execution, step))
    bounds = np.flatnonzero((np.diff(step[order]) != 0) | (np.diff(execution[order]) != 0)) + 1
    found: list[tuple[int, PipelineSpans]] = []
    for rows in np.split(order, bounds):
        by_rank = [rows[rank[rows] == r] for r in ranks]
        if not _is_complete([Counter(zip(kind[own], microbatch[own], strict=True)) for own in by_rank]):
            continue
        complete = PipelineSpans(
            rank=rank[rows], step=step[rows], stage=stage[rows], microbatch=microbatch[rows], kind=kind[rows],
            start_ns=start[rows], end_ns=end[rows],
        )  # fmt: skip
        found.append((int(start[by_rank[0]].min()), complete))
    return [complete for _, complete in sorted(found, key=lambda pair: pair[0])]


def step_idle(spans: PipelineSpans, ranks: Sequence[int], loading_ns: Mapping[int, int] | None = None) -> StepIdle:
    """Idle time of one execution of a step, an element of `complete_steps`.

    `loading_ns`: how long each rank loaded its batch. The pipeline's time then starts when the rank of the first stage
    starts loading, since no rank can compute earlier.
    """
    by_rank = {rank: np.flatnonzero(spans.rank == rank) for rank in ranks}
    first = int(spans.rank[np.argmin(spans.stage)])
    windows_ns = {rank: int(spans.end_ns[own].max() - spans.start_ns[own].min()) for rank, own in by_rank.items()}
    windows_ns[first] += (loading_ns or {}).get(first, 0)
    total_ns = max(windows_ns.values())
    idle = {rank: _rank_idle(own, total_ns, spans.stage, spans.start_ns, spans.end_ns) for rank, own in by_rank.items()}
    mean = sum(rank.idle_ratio for rank in idle.values()) / len(idle)
    return StepIdle(step=int(spans.step[0]), total_ns=total_ns, idle_ratio=mean, ranks=idle)


def _is_complete(counts: list[Counter[tuple[str, int]]]) -> bool:
    """Return True if every rank has run forward and backward for the same microbatches."""
    forward = [{number for kind, number in count if kind == "forward"} for count in counts]
    if not forward[0] or any(numbers != forward[0] for numbers in forward):
        return False
    return all(count["forward", number] == count["backward", number] for count in counts for number in forward[0])


def _rank_idle(rows: Ints, total_ns: int, stage: Ints, start: Ints, end: Ints) -> RankIdle:
    took = end[rows] - start[rows]
    busy = int(took.sum())
    return RankIdle(
        busy_ns=busy,
        idle_ratio=1 - busy / total_ns if total_ns else 0.0,
        busy_ns_by_stage={int(s): int(took[stage[rows] == s].sum()) for s in np.unique(stage[rows])},
    )


def _executions(rank: Ints, step: Ints, stage: Ints, microbatch: Ints, kind: npt.NDArray[np.str_], start: Ints) -> Ints:
    """For each span, the number of earlier spans with the same rank, step, stage, microbatch and kind."""
    number = np.unique(kind, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((start, number, microbatch, stage, step, rank))
    same = np.ones(len(order), dtype=bool)
    same[0] = False
    for column in (rank, step, stage, microbatch, number):
        same[1:] &= column[order][1:] == column[order][:-1]
    position = np.arange(len(order))
    first = np.maximum.accumulate(np.where(same, 0, position))
    executions = np.empty(len(order), dtype=np.int64)
    executions[order] = position - first
    return executions
