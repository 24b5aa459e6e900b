"""Time of a run without a slowdown, by replaying its steps with other durations of work and transfers.

    measured = measure(source)
    measured.slowdown                    # S: 1.31 = the job takes 1.31 times what it would with balanced ranks
    measured.by_rank[3], measured.worst_ranks_ratio, measured.last_stage_ratio
    without(graph, [3], {3: [0, 1, 2]})  # milliseconds per step if rank 3 took no longer than its peers

The definitions are those of Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI 2025), over the recorded dependencies (`step_graph`):

| | |
|---|---|
| S | step time as it ran / step time with all work at the mean over (data-parallel rank, stage, step), transfers at the median |
| S_w | the same with all other workers balanced and worker w as it was: the smaller of its data-parallel rank's and its stage's |
| M_W | share of the slowdown that disappears if the worst 3 % of the workers are balanced, at most 1 |
| M_S | the same if the last stage is balanced |

For a single rank, only its median excess over its peers is removed, at each place of the step. Its noise remains. For a
rank that pauses now and then, the excess of each single step is removed."""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analyzers.account.timings import load_places
from analyzers.policy import SHARED
from analyzers.run.calls.snapshot import attempts
from analyzers.run.records.elsewhere import ranks_without_steps
from analyzers.source import Floats, Source, lacking
from analyzers.whatif.held_out import totals_of
from analyzers.whatif.policy import WhatIfPolicy
from analyzers.whatif.simulate import Graph, Key, replay
from analyzers.whatif.step_graph import StepGraph, load_graph
from analyzers.wording import ranks_text

__all__ = ["WhatIf", "exceeds_error", "measure", "measure_graph", "removed_share", "why_withheld", "without"]

MAX_WORKERS = 64
"""Maximum number of workers for which the slowdown is replayed, those with the largest excess first."""
MAX_OPERATIONS = 3_000_000
"""Maximum number of operations that are replayed for the workers in total: with more operations per worker, fewer
workers are replayed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The whole job's slowdown by stragglers. Ratios; `step_ms` as measured, mean over the steps that were replayed."""

    attempt: int
    first_step: int
    last_step: int
    basis: str
    error_ratio: float
    step_ms: float
    ideal_step_ms: float
    slowdown: float
    by_rank: Mapping[int, float]
    """S_w, the largest first."""
    worst_ranks: tuple[int, ...]
    worst_ranks_ratio: float | None
    last_stage_ratio: float | None
    launch_delay_ratio: float = 0.0
    """Part of the time in which no recorded work ran; the ideal step time contains no such time."""
    lasting_slowdown: float | None = None
    """Part of S from lasting differences between ranks, beyond the noise of their steps. The other part of S comes from
    steps in which another rank is the slowest each time. None if the two parts could not be separated.
    """
    withheld: str = ""
    """Why no gain is claimed; empty if a gain is claimed."""
    has_stages: bool = False
    """True for a pipeline."""

    @property
    def gain(self) -> float:
        """Lower bound of the speed-up by balanced ranks: variation of single steps does not count."""
        return self.slowdown if self.lasting_slowdown is None else min(self.slowdown, self.lasting_slowdown)

    @property
    def is_beyond_error(self) -> bool:
        """True if the gain exceeds the error of the prediction, and is claimed."""
        return not self.withheld and exceeds_error(self.gain, self.error_ratio)

    def to_json(self) -> dict[str, object]:
        """The result as plain values for a report."""
        shown = list(self.by_rank.items())[:MAX_WORKERS]
        return {
            "attempt": self.attempt,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "basis": self.basis,
            "replay_error_ratio": round(self.error_ratio, 4),
            "step_ms": round(self.step_ms, 3),
            "step_without_stragglers_ms": round(self.ideal_step_ms, 3),
            "slowdown_ratio": round(self.slowdown, 4),
            "lasting_slowdown_ratio": _rounded(self.lasting_slowdown),
            "launch_delay_ratio": round(self.launch_delay_ratio, 4),
            "withheld": self.withheld or None,
            "slowdown_by_rank_ratio": {str(rank): round(value, 4) for rank, value in shown},
            "worst_ranks": list(self.worst_ranks),
            "removed_by_worst_ranks_ratio": _rounded(self.worst_ranks_ratio),
            "removed_by_last_stage_ratio": _rounded(self.last_stage_ratio),
        }


def exceeds_error(speedup: float, error_ratio: float | None) -> bool:
    """Return True if a speedup (factor) saves a larger share of the step than the replay's error."""
    return error_ratio is None or 1 - 1 / max(speedup, 1e-9) > error_ratio


def measure(source: Source, policy: WhatIfPolicy | None = None) -> WhatIf | None:
    """Measure the newest attempt that has enough steps of two ranks or more; None if there is none."""
    policy = policy or WhatIfPolicy()
    if lacking(source, steps=("step", "start_ns", "duration_ns")):
        return None
    for attempt in reversed(attempts(source)):
        ((first, last, num_ranks),) = source.rows(
            "SELECT min(step), max(step), count(DISTINCT rank) FROM steps "
            "WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL",
            [attempt],
        )
        if first is None or num_ranks < 2:
            continue
        found = load_graph(source, attempt, first + SHARED.warm_up_steps, last, policy)
        if found is not None:
            stage, worker = load_places(source, attempt)
            whole = measure_graph(found, attempt, stage, worker, policy)
            absent = sorted(ranks_without_steps(source, attempt))
            if not absent or whole.withheld:
                return whole
            return replace(whole, withheld=f"there are no records of {ranks_text(absent)}, which may set the pace")
    return None


def measure_graph(
    found: StepGraph,
    attempt: int,
    stage: Mapping[int, int],
    lane_of: Mapping[int, Key],
    policy: WhatIfPolicy | None = None,
) -> WhatIf:
    """S, S_w, M_W and M_S of a graph. `stage`: stage of each rank; `lane_of`: its coordinates in all other dimensions.
    Pure."""
    policy = policy or WhatIfPolicy()
    graph = found.graph
    ranks = sorted(graph.programs)
    work = np.array(graph.work_ms)
    ideal_work = _ideal_work(graph, stage)
    transfer = _median_transfers(graph)
    work_rank = np.array([rank for rank, _, _ in graph.work_at])
    ran, ideal = replay(graph), max(replay(graph, ideal_work, transfer), 1e-9)
    lanes = {rank: lane_of.get(rank, (rank,)) for rank in ranks}
    excess = np.bincount(work_rank, weights=work - ideal_work)
    by_lane: dict[Key, float] = {}
    by_stage: dict[int, float] = {}
    size = sum(len(program) for program in graph.programs.values())
    num_replayed = max(4, min(MAX_WORKERS, MAX_OPERATIONS // max(1, size)))
    for rank in sorted(ranks, key=lambda r: -excess[r])[:num_replayed]:
        if lanes[rank] not in by_lane:
            as_recorded = [r for r in ranks if lanes[r] == lanes[rank]]
            by_lane[lanes[rank]] = replay(graph, _mixed(work, ideal_work, work_rank, as_recorded), transfer) / ideal
        if stage.get(rank, 0) not in by_stage:
            as_recorded = [r for r in ranks if stage.get(r, 0) == stage.get(rank, 0)]
            mixed = _mixed(work, ideal_work, work_rank, as_recorded)
            by_stage[stage.get(rank, 0)] = replay(graph, mixed, transfer) / ideal
    num_stages = len({stage.get(rank, 0) for rank in ranks})
    by_rank = {
        rank: min(by_lane[lanes[rank]], by_stage[stage.get(rank, 0)]) if num_stages > 1 else by_lane[lanes[rank]]
        for rank in ranks
        if lanes[rank] in by_lane and stage.get(rank, 0) in by_stage
    }
    by_rank = dict(sorted(by_rank.items(), key=lambda pair: -pair[1]))
    worst = tuple(sorted(list(by_rank)[: max(1, math.ceil(policy.worst_share_ratio * len(ranks)))]))
    last_stage = max(stage.get(rank, 0) for rank in ranks)
    last = [rank for rank in ranks if stage.get(rank, 0) == last_stage]

    def removed(chosen: Collection[int]) -> float | None:
        without_ms = replay(graph, _mixed(ideal_work, work, work_rank, chosen))
        return removed_share(ran, ideal, without_ms, found.error_ratio)

    return WhatIf(
        attempt=attempt,
        first_step=graph.steps[0],
        last_step=graph.steps[-1],
        basis=found.basis,
        error_ratio=found.error_ratio,
        step_ms=found.measured_ms,
        ideal_step_ms=found.measured_ms * ideal / ran,
        slowdown=ran / ideal,
        by_rank=by_rank,
        worst_ranks=worst,
        worst_ranks_ratio=removed(worst),
        last_stage_ratio=removed(last) if num_stages > 1 else None,
        launch_delay_ratio=found.launch_delay_ratio,
        lasting_slowdown=replay(graph, ideal_work * _lasting(graph, stage, work_rank), transfer) / ideal,
        withheld=why_withheld(found),
        has_stages=num_stages > 1,
    )


def why_withheld(found: StepGraph) -> str:
    """Why a graph cannot predict a step without the slowdown; empty if it can."""
    if found.launch_delay_ratio <= SHARED.cost_ratio:
        return ""
    return f"no recorded work ran in {100 * found.launch_delay_ratio:.0f} % of the time"


def without(
    found: StepGraph,
    ranks: Collection[int],
    peers: Mapping[int, Collection[int]],
    *,
    share: float = 1.0,
    pauses: bool = False,
    faster_calls: Mapping[str, float] | None = None,
    faster_ranks: Mapping[int, float] | None = None,
) -> float:
    """Milliseconds per step without the slowness of some ranks. Pure.

    `peers`: for each of these ranks, the ranks with the same work. `share`: part of the excess that is removed, if it
    has several causes. `pauses`: True if the ranks are slow in some steps only. `faster_calls`: {dimension of groups:
    factor on their transfers}, for a slow link. `faster_ranks`: {rank: factor on all its work}, for a rank without
    peers that became slower than before.
    """
    graph = found.graph
    totals = totals_of(graph, graph.work_ms)
    work = np.array(graph.work_ms)
    scale: dict[Key, float] = {}
    for rank in ranks:
        compared = [peer for peer in peers.get(rank, ()) if peer not in ranks] or [
            peer for peer in peers.get(rank, ()) if peer != rank
        ]
        excess: dict[Key, list[float]] = {}
        own = {key: total for key, total in totals.items() if key[0] == rank}
        typical: dict[Key, float] = {}
        for (_, step, place), (total, number) in own.items():
            of_peers = [totals[peer, step, place] for peer in compared if (peer, step, place) in totals]
            comparable = [ms for ms, count in of_peers if count == number]
            if comparable:
                typical[step, place] = float(np.median(comparable))
                excess.setdefault((number, place), []).append(total - typical[step, place])
        for (_, step, place), (total, number) in own.items():
            found_here = excess.get((number, place))
            if found_here and total > 0:
                more = max(0.0, total - typical.get((step, place), total)) if pauses else float(np.median(found_here))
                less = max(0.0, total - share * more)
                scale[rank, step, place] = less / total
    for number, at in enumerate(graph.work_at):
        work[number] *= scale.get(at, 1.0) * (faster_ranks or {}).get(at[0], 1.0)
    transfer = np.array(graph.transfer_ms)
    for number, (dimension, *_) in enumerate(graph.call_of):
        transfer[number] *= (faster_calls or {}).get(str(dimension), 1.0)
    return found.measured_ms * replay(graph, work, transfer) / max(replay(graph), 1e-9)


def _lasting(graph: Graph, stage: Mapping[int, int], work_rank: Any) -> Floats:
    """For each piece of work, the factor by which its rank is lastingly slower or faster than the stage.

    Means of blocks of steps are compared, and the difference is reduced by `sure_sigmas` standard errors of its mean.
    """
    ranks, steps = sorted(graph.programs), {step: place for place, step in enumerate(graph.steps)}
    rows = {rank: row for row, rank in enumerate(ranks)}
    took = np.zeros((len(ranks), len(steps)))
    for (rank, step, _), ms, delay in zip(graph.work_at, graph.work_ms, graph.delay_ms, strict=True):
        took[rows[rank], steps[step]] += ms - delay
    size = min(SHARED.block_steps, max(1, took.shape[1] // 4))
    blocks = took[:, : took.shape[1] // size * size].reshape(len(ranks), -1, size).mean(axis=2)
    factor = np.ones(len(ranks))
    for at in {stage.get(rank, 0) for rank in ranks}:
        own = np.array([row for rank, row in rows.items() if stage.get(rank, 0) == at])
        level = blocks[own].mean(axis=0)
        excess = blocks[own] - level
        error = excess.std(axis=1, ddof=1) / np.sqrt(excess.shape[1]) if excess.shape[1] > 1 else np.inf
        mean = excess.mean(axis=1)
        sure = np.sign(mean) * np.maximum(0.0, np.abs(mean) - SHARED.sure_sigmas * error)
        factor[own] = 1 + sure / max(float(level.mean()), 1e-9)
    by_rank = dict(zip(ranks, factor, strict=True))
    return np.array([by_rank[int(rank)] for rank in work_rank])


def _ideal_work(graph: Graph, stage: Mapping[int, int]) -> Floats:
    """Set every piece of work to the mean of its place over data-parallel ranks and steps, make the stages equal, and
    remove launch delay."""
    work_ms = [ms - delay for ms, delay in zip(graph.work_ms, graph.delay_ms, strict=True)]
    totals = totals_of(graph, work_ms)
    places: dict[Key, list[float]] = {}
    for (rank, _, place), (total, number) in totals.items():
        places.setdefault((stage.get(rank, 0), number, place), []).append(total)  # type: ignore[call-overload]
    mean = {key: float(np.mean(values)) for key, values in places.items()}
    work_of_stage: dict[int, list[float]] = {}
    for (rank, _, place), (_, number) in totals.items():
        at = stage.get(rank, 0)  # type: ignore[call-overload]
        work_of_stage.setdefault(at, []).append(mean[at, number, place])
    count = {at: len({(k[0], k[1]) for k in totals if stage.get(k[0], 0) == at}) for at in work_of_stage}  # type: ignore[call-overload]
    per_step = {at: sum(values) / count[at] for at, values in work_of_stage.items()}
    level = float(np.mean(list(per_step.values())))
    ideal = np.zeros(len(graph.work_ms))
    given: set[Key] = set()
    for number, (rank, step, place) in enumerate(graph.work_at):
        total, calls = totals[rank, step, place]
        at = stage.get(rank, 0)
        target = mean[at, calls, place] * (level / per_step[at] if per_step[at] else 1.0)
        if total > 0:
            ideal[number] = work_ms[number] / total * target
        elif (rank, step, place) not in given:
            ideal[number] = target
        given.add((rank, step, place))
    return ideal


def _median_transfers(graph: Graph) -> Floats:
    """Set every transfer to the median of its kind of call."""
    by_kind: dict[Key, list[float]] = {}
    for key, ms in zip(graph.call_of, graph.transfer_ms, strict=True):
        by_kind.setdefault(key, []).append(ms)
    middle = {key: float(np.median(values)) for key, values in by_kind.items()}
    return np.array([middle[key] for key in graph.call_of])


def _mixed(inside: Floats, outside: Floats, work_rank: Any, ranks: Collection[int]) -> Floats:
    """Take the work of some ranks from `inside`, and the work of the others from `outside`."""
    mixed: Floats = np.where(np.isin(work_rank, list(ranks)), inside, outside)
    return mixed


def removed_share(ran: float, ideal: float, without: float, error_ratio: float) -> float | None:
    """Share of the slowdown that disappears if a step takes `without` instead of `ran`, and `ideal` without slowdown.
    Pure.

    1 at most: in a pipeline, work that is removed saves more than work that is spread over the other stages. None if
    there is hardly any slowdown, if the slowdown is within the error of the prediction, or if the step is predicted
    longer by more than this error.
    """
    error = error_ratio * ran
    if ran <= (1 + SHARED.min_share_ratio) * ideal or ran - ideal <= error or ran - without < -error:
        return None
    return min(1.0, max(0.0, (ran - without) / (ran - ideal)))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
