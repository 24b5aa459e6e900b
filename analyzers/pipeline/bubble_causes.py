"""Causes of idle time beyond the schedule's own: unequal stages, communication between stages, waiting for data.

    (step, *_) = split_idle(complete_steps(spans, ranks), ranks, loading_ns={(5, 0): 2_000_000})
    step.idle.idle_ratio                     # measured
    step.even_ratio                          # idle share of the same order with equal stages and no communication
    step.imbalance_ratio, step.communication_ratio, step.data_ratio        # parts of the excess; they add up

Each step is replayed in the order in which its ranks worked. Each further replay removes one more cause of idle time:

1. As it ran: from the start of the first stage's loading to the last backward.
2. Without communication: a stage continues as soon as its input is computed. The difference is *communication*: message
   transfers, and gaps between two computations of a rank.
3. Also without loading. The difference is *waiting for data*. All ranks are assumed to begin to load at the same time.
4. With all stages equal: every forward, backward and weight pass takes the mean of its kind over stages and
   microbatches. The difference is *imbalance*. The remaining idle time is the schedule's own. All replays do the same
   total work, so the shares can be added up. Only durations and each rank's own order are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analyzers.account.bubble import PipelineSpans, StepIdle, step_idle

__all__ = ["StepSplit", "split_idle", "typical"]

MAX_REPLAYED_SPANS = 400_000
"""Maximum number of spans for which all steps are replayed; with more spans, only every k-th step is replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """Measured idle time of one step, including the loading of the first stage, and its parts as shares of the
    pipeline's time. The four ratios add up to the idle share."""

    idle: StepIdle
    even_ratio: float
    """Idle share with equal stages and no communication: the schedule's own."""
    imbalance_ratio: float
    communication_ratio: float
    data_ratio: float
    imbalance_ns: float
    """Nanoseconds by which the step would be shorter with equal stages."""
    times_ns: tuple[float, float, float]
    """Mean times of a stage's forward (with the loss), backward and weight spans."""


def split_idle(
    steps: Sequence[PipelineSpans], ranks: Sequence[int], loading_ns: Mapping[tuple[int, int], int] | None = None
) -> list[StepSplit]:
    """Split the bubble of each execution of a step (`bubble.complete_steps`), if its order can be replayed.

    `loading_ns`: by (step, rank), the rank's own time for loading its batch.
    """
    every = max(1, -(-sum(len(one.rank) for one in steps) // MAX_REPLAYED_SPANS))
    found = (_split(one, ranks, loading_ns or {}) for one in steps[::every])
    return [split for split in found if split is not None]


def typical(splits: Sequence[StepSplit]) -> list[StepSplit]:
    """The middle half of the steps by length. Unlike medians, means over them add up, and they contain no pauses."""
    ordered = sorted(splits, key=lambda split: split.idle.total_ns)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def _split(one: PipelineSpans, ranks: Sequence[int], loading_ns: Mapping[tuple[int, int], int]) -> StepSplit | None:
    number = int(one.step[0])
    loading = {rank: loading_ns.get((number, rank), 0) for rank in ranks}
    idle = step_idle(one, ranks, loading)
    order = _order(one)
    if order is None:
        return None
    took = (one.end_ns - one.start_ns).astype(np.float64)
    even, times = _equal_stages(one, took)
    first = int(one.rank[np.argmin(one.stage)])
    with_loading = min(float(idle.total_ns), _replay(one, order, took, loading, first))
    without_loading = min(with_loading, _replay(one, order, took, {}, first))
    evened = _replay(one, order, even, {}, first)
    if evened <= 0:
        return None
    busy = float(took.sum()) / len(ranks)
    shares = [1 - busy / total for total in (float(idle.total_ns), with_loading, without_loading, evened)]
    return StepSplit(
        idle=idle,
        even_ratio=shares[3],
        communication_ratio=shares[0] - shares[1],
        data_ratio=shares[1] - shares[2],
        imbalance_ratio=shares[2] - shares[3],
        imbalance_ns=without_loading - evened,
        times_ns=times,
    )


@dataclass(frozen=True, slots=True)
class _Order:
    """Spans in topological order, and for each span the spans that it needs."""

    spans: list[int]
    needs: list[list[int]]


def _order(one: PipelineSpans) -> _Order | None:
    """Order a step's spans; None if a computation was recorded twice, or if the orders of the ranks contradict each
    other."""
    kind = np.asarray(one.kind).astype(str)
    place = {
        key: row for row, key in enumerate(zip(kind.tolist(), one.stage.tolist(), one.microbatch.tolist(), strict=True))
    }
    needs: list[list[int]] = []
    for name, stage, microbatch in place:
        inputs = {
            "forward": [("forward", stage - 1, microbatch)],
            "backward": [("forward", stage, microbatch), ("backward", stage + 1, microbatch)],
            "weight": [("backward", stage, microbatch)],
        }.get(name, [])
        needs.append([place[key] for key in inputs if key in place])
    if len(needs) < len(kind):
        return None  # a computation was recorded twice
    rows = np.lexsort((one.start_ns, one.rank))
    by_rank = [part.tolist() for part in np.split(rows, np.flatnonzero(np.diff(one.rank[rows])) + 1)]
    at = [0] * len(by_rank)
    done: list[int] = []
    is_done = np.zeros(len(kind), dtype=bool)
    while len(done) < len(kind):
        before = len(done)
        for i, spans in enumerate(by_rank):
            while at[i] < len(spans) and all(is_done[need] for need in needs[spans[at[i]]]):
                is_done[spans[at[i]]] = True
                done.append(spans[at[i]])
                at[i] += 1
        if len(done) == before:
            return None
    return _Order(done, needs)


def _replay(
    one: PipelineSpans, order: _Order, took: npt.NDArray[np.float64], loading: Mapping[int, int], first: int
) -> float:
    """The longest time, over the ranks, from the start of a rank's first computation to the end of its last one, in
    nanoseconds. The rank `first`, which has the first stage, starts with its loading."""
    ranks, lengths = one.rank.tolist(), took.tolist()
    now = {rank: float(loading.get(rank, 0)) for rank in set(ranks)}
    begin: dict[int, float] = {first: 0.0}
    end = [0.0] * len(ranks)
    for row in order.spans:
        rank = ranks[row]
        start = max([now[rank], *(end[need] for need in order.needs[row])])
        begin.setdefault(rank, start)
        now[rank] = end[row] = start + lengths[row]
    return max(now[rank] - begin[rank] for rank in now)


def _equal_stages(
    one: PipelineSpans, took: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], tuple[float, float, float]]:
    """Times of the spans with all stages and microbatches equal, and the mean of each kind."""
    kind = np.asarray(one.kind).astype(str)
    even = np.zeros(len(took))
    forward = kind == "forward"
    even[forward] = (took[forward].sum() + took[kind == "loss"].sum()) / max(1, forward.sum())
    # A backward of the inputs alone is shorter than a whole backward: its weights have a separate, later span.
    with_weight = set(zip(one.stage[kind == "weight"].tolist(), one.microbatch[kind == "weight"].tolist(), strict=True))
    is_split = np.array([key in with_weight for key in zip(one.stage.tolist(), one.microbatch.tolist(), strict=True)])
    for rows in ((kind == "backward") & is_split, (kind == "backward") & ~is_split, kind == "weight"):
        if rows.any():
            even[rows] = took[rows].mean()
    means = [float(even[kind == name].mean()) if (kind == name).any() else 0.0 for name in ("backward", "weight")]
    return even, (float(even[forward].mean()) if forward.any() else 0.0, means[0], means[1])
