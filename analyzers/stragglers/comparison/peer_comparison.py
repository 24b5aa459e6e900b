"""Compare ranks with their peers: find ranks that are persistently slower than others with the same work. Pure.

    for slow in find_stragglers(timings):
        slow.rank, slow.cause, slow.first_step, slow.excess_ms

1. A rank's own time in a phase is the phase without waits in collectives (`account.timings`). Ranks leave a collective
   together, so a rank that waits long is a victim. Time in a gap between phases is also own work. Checkpoints,
   evaluation and logging are left out, because one rank may do these for all. Clocks are not compared.
2. Peers have the same work: the same pipeline stage. For data loading, peers also have the same place in their tensor-
   and context-parallel groups, because often only a group's first rank loads. Ranks without peers are judged by
   `past_comparison`. A rank's excess in an observation is its own time minus the other peers' median, divided by the
   peers' whole own time. The excess is computed for compute (forward, backward, optimizer and the gaps) and for data.
   Small phases and gaps are also compared separately, since the noise of all work may hide a rank.
3. `persistence` finds outlier ranks with first and last step, against the noise of this run. `change_point` finds
   smaller slowdowns of a rank against its own past. `pauses` finds ranks that stop repeatedly but are as fast as the
   others in between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from analyzers.account.timings import WHOLE_STEP, Matrix, Timings
from analyzers.policy import SHARED
from analyzers.robust import others_median, sigma
from analyzers.source import Ints
from analyzers.stragglers.comparison.change_point import crowding, find_changes, steps_for_crowding
from analyzers.stragglers.comparison.pauses import find_pauses
from analyzers.stragglers.comparison.persistence import Segment, find_segments
from analyzers.stragglers.policy import StragglerPolicy

__all__ = [
    "Cause",
    "Straggler",
    "find_stragglers",
    "is_large",
    "is_significant",
    "measured",
    "num_steps_of",
    "outlasts_bursts",
    "place_of",
    "step_growth",
    "within_step_growth",
    "without_side_effects",
]  # fmt: skip

Cause = Literal["compute", "data"]
Vector = npt.NDArray[np.float32]
_BETWEEN_STEPS = ("before_forward", "after_optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One slow rank with one cause. Times are in ms per step: medians over its segments, or means if it pauses."""

    rank: int
    cause: Cause
    segments: tuple[Segment, ...]
    first_step: int
    last_step: int
    factor: float
    excess_ms: float
    step_ms: float
    step_without_ms: float
    phase_factors: dict[str, float]
    phase_excess_ms: dict[str, float]
    peers_wait_more_ms: float
    num_steps: int
    ongoing: bool
    paused_ratio: float = 0.0
    """Share of the steps in which it pauses; 0 if it is slow in most steps."""
    has_peers: bool = True
    """True if compared with peers; False if the rank was compared with its own past, because no other rank has the same
    work."""
    place: str = ""
    """Phase or gap that holds nearly all of the excess; empty if none does (a rank that is slow everywhere), or if CPU
    time was compared, which is not known by place."""
    by_cpu: bool = False
    """True if CPU time was compared; `excess_ms` and `factor` are then of CPU time."""


def place_of(excess_ms: Mapping[str, float], cause: Cause) -> str:
    """The phase or gap that holds nearly all of the excess of one cause; empty if none does. `excess_ms`: by place."""
    of_cause = {p: v for p, v in excess_ms.items() if (p == "data") == (cause == "data")}
    place = max(of_cause, key=lambda name: of_cause[name])
    # The share is of the sum of the parts, and not of the whole excess, because medians do not add up.
    least = SHARED.agreement_ratio * sum(max(0.0, v) for v in of_cause.values())
    if of_cause[place] >= least:
        return place
    # In an attached loop, time before the first forward pass counts as the end of the previous step.
    between = sum(of_cause.get(gap, 0.0) for gap in _BETWEEN_STEPS)
    return "before_forward" if between >= least else ""


def find_stragglers(timings: Timings, policy: StragglerPolicy | None = None) -> list[Straggler]:
    """Find slow ranks of one attempt, by compute and data. Pure."""
    policy = policy or StragglerPolicy()
    found: list[Straggler] = []
    for peers in timings.peers:
        if len(peers) < 2 or len(timings.steps) < timings.observations_for(SHARED.min_steps):
            continue
        compute, data = timings.compute[peers], timings.own["data"][peers]
        together = compute + data
        of_others = others_median(together)
        whole: Matrix = np.maximum(of_others, 1e-3).astype(np.float32)
        compute_excess = compute - others_median(compute)
        data_excess = np.zeros_like(data)  # stays 0 for a rank without peers in data loading
        kinds: list[tuple[Cause, Ints, Matrix, Matrix]] = [("compute", np.arange(len(peers)), compute, compute_excess)]
        for loaders in (np.flatnonzero(np.isin(peers, group)) for group in timings.data_peers):
            if len(loaders) > 1:
                data_excess[loaders] = data[loaders] - others_median(data[loaders])
                kinds.append(("data", loaders, data[loaders], data_excess[loaders]))
        ranks: dict[int, list[Straggler]] = {}
        for cause, rows, values, excess_ms in kinds:
            own = whole[rows], together[rows]
            for row, straggler in _steady(timings, peers[rows], cause, (values, excess_ms), own, policy):
                ranks.setdefault(int(rows[row]), []).append(straggler)
        for row, straggler in _in_one_place(timings, peers, (whole, together, together - of_others), policy):
            ranks[row] = _with_place(ranks.get(row, []), straggler)
        all_load = any(len(rows) == len(peers) for cause, rows, *_ in kinds if cause == "data")
        excess_ms = together - of_others if all_load else compute_excess + data_excess
        for segment in find_pauses(excess_ms / whole, policy.pauses, timings.steps):
            if not outlasts_bursts(timings, segment, policy) or _is_explained(
                segment, excess_ms[segment.row], ranks.get(segment.row, [])
            ):
                continue
            # A pause may fall into any phase: report one finding, for the phase with the most pauses.
            at = slice(segment.begin, segment.end)
            lost_in_data, lost = data_excess[segment.row, at].mean(), excess_ms[segment.row, at].mean()
            cause = "data" if lost_in_data > SHARED.agreement_ratio * lost else "compute"
            straggler = measured(timings, (peers, segment.row), cause, [segment], excess_ms, segment.agreement)
            if is_significant(straggler):
                ranks[segment.row] = [straggler]
        found += [straggler for stragglers in ranks.values() for straggler in stragglers]
    return sorted(without_side_effects(found), key=lambda straggler: -straggler.excess_ms)


def without_side_effects(stragglers: Sequence[Straggler]) -> list[Straggler]:
    """Drop causes of a rank that are small compared to its largest one."""
    largest: dict[int, float] = {}
    for straggler in stragglers:
        largest[straggler.rank] = max(straggler.excess_ms, largest.get(straggler.rank, 0.0))
    return [s for s in stragglers if s.excess_ms >= SHARED.minor_ratio * largest[s.rank]]


def _steady(
    timings: Timings,
    ranks: Ints,
    cause: Cause,
    work: tuple[Matrix, Matrix],
    own: tuple[Matrix, Matrix],
    policy: StragglerPolicy,
) -> Iterator[tuple[int, Straggler]]:
    """Yield (row, straggler) of ranks that are slow in most steps. `work`: the work of this cause, and its excess over
    the peers'; `own`: all work of the peers, and of each rank."""
    (values, excess_ms), (of_peers, of_rank) = work, own
    least = steps_for_crowding(crowding(of_rank), policy)
    by_row: dict[int, list[Segment]] = {}
    for segment in _own_segments(timings, values, excess_ms, of_peers, policy):
        if outlasts_bursts(timings, segment, policy, least):
            by_row.setdefault(segment.row, []).append(segment)
    for segment in find_changes(excess_ms / of_peers, values, of_rank, policy.change):
        if outlasts_bursts(timings, segment, policy, least):
            by_row.setdefault(segment.row, [segment])
    for row, segments in by_row.items():
        straggler = measured(timings, (ranks, row), cause, segments, excess_ms)
        if is_significant(straggler):
            yield row, straggler


def _own_segments(
    timings: Timings, values: Matrix, excess_ms: Matrix, whole: Matrix, policy: StragglerPolicy
) -> list[Segment]:
    """Segments of slow ranks. If at least half of more than two ranks are slow together, the others may have become
    faster instead, so a segment is kept only if the rank's own time has grown.
    """
    segments = find_segments(excess_ms / whole, policy.persistence, steps=timings.stamped)

    def is_own(one: Segment) -> bool:
        together = {other.row for other in segments if other.begin < one.end and one.begin < other.end}
        if len(values) == 2 or 2 * len(together) < len(values):
            return True
        before, since = values[one.row, : one.begin], slice(one.begin, one.end)
        if len(before) < timings.observations_for(SHARED.history, slice(one.begin)):
            return False
        grown_ms = float(np.median(values[one.row, since]) - np.median(before))
        return grown_ms >= SHARED.explained_ratio * float(np.median(excess_ms[one.row, since]))

    return [segment for segment in segments if is_own(segment)]


def _in_one_place(
    timings: Timings, peers: Ints, own: tuple[Matrix, Matrix, Matrix], policy: StragglerPolicy
) -> Iterator[tuple[int, Straggler]]:
    """Yield (row, straggler) of ranks that are slow in one small phase or gap, above the noise of that place. `own`:
    all work of the peers, of each rank, and its excess over the peers'.

    Work that only moved to this place from another is not counted.
    """
    whole, together, total_excess_ms = own
    clear = replace(policy.change, min_effect_ratio=policy.persistence.min_effect_ratio)
    least = steps_for_crowding(crowding(together), policy)
    best: dict[int, tuple[float, Straggler]] = {}
    for place in timings.own:
        values = timings.own[place][peers]
        if place == "data" or is_large(values, together, policy):
            continue
        excess_ms = values - others_median(values)
        found = _own_segments(timings, values, excess_ms, whole, policy)
        found += find_changes(excess_ms / whole, values, together, clear)
        for segment in found:
            row, at = segment.row, slice(segment.begin, segment.end)
            if (
                _has_moved(excess_ms[row, at], total_excess_ms[row, at])
                or not outlasts_bursts(timings, segment, policy, least)
                or segment.effect <= best.get(row, (0.0,))[0]
            ):
                continue
            straggler = replace(measured(timings, (peers, row), "compute", [segment], excess_ms), place=place)
            if is_significant(straggler):
                best[row] = (segment.effect, straggler)
    yield from ((row, straggler) for row, (_, straggler) in best.items())


def _has_moved(in_place_ms: Vector, in_all_ms: Vector) -> bool:
    """Return True if the rank's other work is certainly shorter, by a good part of this place's excess."""
    others_ms = in_all_ms - in_place_ms
    error_ms = sigma(others_ms) / math.sqrt(max(len(others_ms), 1))
    most_ms = float(np.median(others_ms)) + SHARED.interval_sigmas * error_ms
    return most_ms < -SHARED.explained_ratio * float(np.median(in_place_ms))


def _with_place(known: list[Straggler], in_place: Straggler) -> list[Straggler]:
    """Add the place where a rank is slow to its causes. If the excess in that place exceeds the excess in all work, the
    other work's noise hides a part of the slow steps: then onset and end are taken from the place."""
    computing = [one for one in known if one.cause != "data"]
    lost_ms = sum(one.excess_ms * one.num_steps for one in computing)
    if in_place.excess_ms * in_place.num_steps > lost_ms:
        return [in_place, *(one for one in known if one.cause == "data")]
    return [_placed(one, in_place) for one in known]


def _placed(known: Straggler, in_place: Straggler) -> Straggler:
    """Set the place of a slow rank: the one that holds most of the excess, if the rank's other phases are too noisy."""
    if known.cause == "data" or known.place:
        return known
    holds_most = in_place.excess_ms >= SHARED.agreement_ratio * known.excess_ms
    return replace(known, place=in_place.place) if holds_most else known


def is_large(values: Matrix, together: Matrix, policy: StragglerPolicy) -> bool:
    """Return True if a place has so much of a typical rank's work that both have the same noise."""
    usual = np.quantile(values, 0.25, axis=1) / np.maximum(np.quantile(together, 0.25, axis=1), 1e-3)
    # Of two ranks the smaller value is taken, because the mean of both would include the slow rank.
    return bool(np.quantile(usual, 0.5, method="lower") > policy.small_place_ratio)


def _is_explained(pauses: Segment, excess_ms: Matrix, steady: list[Straggler]) -> bool:
    """Return True if most of a rank's loss by pauses lies in steps that `steady` already covers."""
    slow = np.zeros(len(excess_ms), dtype=bool)
    for segment in (segment for straggler in steady for segment in straggler.segments):
        slow[segment.begin : segment.end] = True
    lost = excess_ms[pauses.begin : pauses.end]
    return bool(lost[slow[pauses.begin : pauses.end]].sum() >= SHARED.agreement_ratio * lost.sum())


def outlasts_bursts(
    timings: Timings, segment: Segment, policy: StragglerPolicy, least_steps: int = SHARED.min_steps
) -> bool:
    """Return True if a segment lasted longer (in seconds) than a burst of another job: steps may be short. On a busy
    machine it must also last for `least_steps`, because bursts make the steps long.
    """
    at = slice(segment.begin, segment.end)
    step_s = float(np.mean(np.median(timings.duration[:, at], axis=0))) / 1e3
    num_steps = num_steps_of(timings.steps, segment)
    return num_steps >= least_steps and num_steps * step_s >= segment.num_required * policy.burst_step_s


def is_significant(straggler: Straggler) -> bool:
    """Return True if the excess is a relevant part of a step."""
    share = straggler.excess_ms / max(straggler.step_ms, 1e-6)
    return straggler.excess_ms >= SHARED.min_excess_ms and share >= SHARED.min_share_ratio


def num_steps_of(steps: Ints, segment: Segment) -> int:
    """Number of steps that a segment's observations represent: very long runs are downsampled."""
    return 1 + int(np.maximum(np.diff(steps[segment.begin : segment.end]), 1).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Increase of the step time when a rank became slow, in medians (or means), and the noise of the steps before."""

    ms: float
    sigma_ms: float


def step_growth(timings: Timings, slow: Straggler) -> Growth | None:
    """Return how much the step time grew when a rank became slow, an upper bound of the rank's cost; None if there are
    too few earlier steps."""
    begin = slow.segments[0].begin
    # Go back to the first slow step: the host may have been late before the segment.
    while begin and slow.first_step <= timings.steps[begin - 1] < timings.steps[begin]:
        begin -= 1
    if begin < timings.observations_for(SHARED.history, slice(begin)):
        return None
    before = np.median(timings.duration[:, :begin], axis=0)
    typical = np.mean if slow.paused_ratio else np.median
    return Growth(ms=max(0.0, slow.step_ms - float(typical(before))), sigma_ms=sigma(before))


def within_step_growth(timings: Timings, slow: Straggler) -> Straggler:
    """Limit the excess of a device that waits for its host to the growth of the step. If the step did not grow, the
    device was idle for as long before. At that time it waited for other ranks and not for its host. The growth is
    ignored if the earlier steps vary by as much.
    """
    growth = step_growth(timings, slow)
    if growth is None or slow.excess_ms <= max(growth.ms, growth.sigma_ms):
        return slow
    share = growth.ms / slow.excess_ms
    return replace(slow, excess_ms=growth.ms, factor=1 + (slow.factor - 1) * share)


def measured(
    timings: Timings,
    place: tuple[Ints, int],
    cause: Cause,
    segments: list[Segment],
    excess_ms: Matrix,
    paused_ratio: float = 0.0,
) -> Straggler:
    """Measure a slow rank; `place`: rows of its peers, and its position among them."""
    peers, row = place
    typical = np.mean if paused_ratio else np.median
    segments = sorted(segments, key=lambda segment: segment.begin)
    index = np.concatenate([np.arange(segment.begin, segment.end) for segment in segments])
    factors, excesses = {}, {}
    for phase in timings.own:
        values = timings.own[phase][np.ix_(peers, index)]
        baseline = others_median(values)[row]
        mine, theirs = float(typical(values[row])), float(typical(baseline))
        excesses[phase] = float(typical(values[row] - baseline))
        factors[phase] = mine / theirs if theirs > 1e-3 else float("inf") if mine > 1e-3 else 1.0
    whole: Matrix = functools.reduce(np.add, [values[np.ix_(peers, index)] for values in timings.own.values()])
    baseline = others_median(whole)[row]
    # Steps with a baseline of 0 are left out: some ranks have not yet recorded the calls of the last steps.
    if paused_ratio and (is_known := baseline > 1e-3).any():
        index, whole, baseline = index[is_known], whole[:, is_known], baseline[is_known]
    per_rank = typical(excess_ms[:, index], axis=1)
    excess = float(per_rank[row])
    next_slowest = float(np.max(np.delete(per_rank, row), initial=0.0))
    # Ranks that wait for each other have equally long steps, so the median is taken. If whole steps were compared, they
    # differ, and the slowest rank determines the job's step.
    of_ranks = np.max if WHOLE_STEP in timings.own else np.median
    step_ms = float(typical(of_ranks(timings.duration[np.ix_(peers, index)], axis=0)))
    gain = max(0.0, excess - max(0.0, next_slowest))
    waits = timings.wait[np.ix_(peers, index)]
    return Straggler(
        rank=int(timings.ranks[peers[row]]),
        cause=cause,
        segments=tuple(segments),
        first_step=int(timings.steps[segments[0].begin]),
        last_step=int(timings.steps[segments[-1].end - 1]),
        factor=float(
            np.mean(whole[row]) / max(float(np.mean(baseline)), 1e-3)
            if paused_ratio
            else np.median(whole[row] / np.maximum(baseline, 1e-3))
        ),
        excess_ms=excess,
        step_ms=step_ms,
        step_without_ms=max(step_ms - gain, step_ms * 0.01),
        phase_factors=factors,
        phase_excess_ms=excesses,
        place=place_of(excesses, cause),
        peers_wait_more_ms=float(typical(others_median(waits)[row] - waits[row])),
        num_steps=sum(num_steps_of(timings.steps, segment) for segment in segments),
        ongoing=segments[-1].ongoing,
        paused_ratio=paused_ratio,
    )
