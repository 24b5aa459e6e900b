"""Comparison of ranks with their peers: who is persistently slower than the ranks that do the same work. Pure.

    for slow in find_stragglers(timings):
        slow.rank, slow.cause, slow.first_step, slow.excess_ms

1. A rank's own time of a phase is the phase without waits in collectives (`account.timings`): ranks leave a collective
   together, so a rank that waits long is a victim. Checkpoints, evaluation and logging are left out: one rank may do
   those for all. Clocks are not compared.
   The time between phases is own work, too, by gap.
2. Peers have the same work: the same pipeline stage, and for loading also the same place in their tensor- and
   context-parallel groups, of which often the first alone loads. For each observation the excess of a rank is its own
   time minus the median of its peers' (itself excluded), over the peers' whole own time; for compute (forward,
   backward, optimizer and the gaps) and for data. `past_comparison` judges ranks without peers.
   Where the noise of all work hides a rank, each small phase and gap is compared by itself.
3. `persistence` finds ranks that stand out, from which step to which, against the noise of this run; `change_point`
   ranks that became slower than they were, by less; `pauses` ranks that stop again and again and are as fast as the
   others in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from analyzers.account.timings import WHOLE_STEP, Matrix, Timings, others_median
from analyzers.policy import SHARED
from analyzers.robust import sigma
from analyzers.source import Ints
from analyzers.stragglers.change_point import find_changes
from analyzers.stragglers.pauses import find_pauses
from analyzers.stragglers.persistence import Segment, find_segments
from analyzers.stragglers.policy import StragglerPolicy

__all__ = [
    "Cause",
    "Straggler",
    "complete",
    "find_stragglers",
    "is_large",
    "is_significant",
    "measured",
    "num_steps_of",
    "outlasts_bursts",
    "places_of",
    "step_before_ms",
    "with_median_rest",
    "within_step_growth",
    "without_side_effects",
]  # fmt: skip

Cause = Literal["compute", "data"]
Vector = npt.NDArray[np.float32]
_BETWEEN_STEPS = ("before_forward", "after_optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One slow rank with one cause: numbers for the finding. Times in ms per step, medians over its segments; means if
    it pauses."""

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
    """Share of the steps in which it pauses, as fast as the others in between; 0: it is slow in most of them."""
    has_peers: bool = True
    """Whether it was compared with peers; else with its own past, since no rank has the same work."""
    found_in: str = ""
    """Phase or gap that shows it alone; empty where all of its work does."""
    by_cpu: bool = False
    """Whether CPU time was compared, and excess and factor are of it."""

    def place(self) -> str:
        """Phase or gap that holds nearly all of the excess; empty if none does (a rank that is slow everywhere)."""
        if self.found_in or self.by_cpu:  # the wall clock, which knows the places, shows no excess
            return self.found_in
        of_cause = {p: v for p, v in self.phase_excess_ms.items() if (p == "data") == (self.cause == "data")}
        place = max(of_cause, key=lambda name: of_cause[name])
        # Not of `excess_ms`: medians of parts do not add up to the median of the whole.
        least = SHARED.agreement_ratio * sum(max(0.0, v) for v in of_cause.values())
        if of_cause[place] >= least:
            return place
        # Time before the first forward pass of an attached loop belongs to the end of the step before it.
        between = sum(of_cause.get(gap, 0.0) for gap in _BETWEEN_STEPS)
        return "before_forward" if between >= least else ""


def find_stragglers(timings: Timings, policy: StragglerPolicy | None = None) -> list[Straggler]:
    """Find slow ranks of one attempt, by compute and data. Pure."""
    policy = policy or StragglerPolicy()
    found: list[Straggler] = []
    for peers in timings.peers:
        if len(peers) < 2 or len(timings.steps) < SHARED.min_steps:
            continue
        compute, data = complete(timings.compute[peers]), complete(timings.own["data"][peers])
        together = compute + data
        whole: Matrix = np.maximum(others_median(together), 1e-3).astype(np.float32)
        data_excess = np.zeros_like(data)  # stays 0 for a rank without another that loads the same
        kinds: list[tuple[Cause, Ints, Matrix]] = [("compute", np.arange(len(peers)), compute)]
        for loaders in (np.flatnonzero(np.isin(peers, group)) for group in timings.data_peers):
            if len(loaders) > 1:
                data_excess[loaders] = data[loaders] - others_median(data[loaders])
                kinds.append(("data", loaders, data[loaders]))
        ranks: dict[int, list[Straggler]] = {}
        for cause, rows, values in kinds:
            for row, straggler in _steady(timings, peers[rows], cause, values, (whole[rows], together[rows]), policy):
                ranks.setdefault(int(rows[row]), []).append(straggler)
        for row, straggler in _in_one_place(timings, peers, (whole, together), policy):
            ranks[row] = _with_place(ranks.get(row, []), straggler)
        all_load = any(len(rows) == len(peers) for cause, rows, _ in kinds if cause == "data")
        excess_ms = together - others_median(together) if all_load else compute - others_median(compute) + data_excess
        for segment in find_pauses(excess_ms / whole, policy.pauses):
            if not outlasts_bursts(timings, segment, policy) or _is_explained(
                segment, excess_ms[segment.row], ranks.get(segment.row, [])
            ):
                continue
            # A pause hits the rank in any phase: one finding, of the phase that it mostly hit.
            at = slice(segment.begin, segment.end)
            lost_in_data, lost = data_excess[segment.row, at].mean(), excess_ms[segment.row, at].mean()
            cause = "data" if lost_in_data > SHARED.agreement_ratio * lost else "compute"
            straggler = measured(timings, (peers, segment.row), cause, [segment], excess_ms, segment.agreement)
            if is_significant(straggler):
                ranks[segment.row] = [straggler]
        found += [straggler for stragglers in ranks.values() for straggler in stragglers]
    return sorted(without_side_effects(found), key=lambda straggler: -straggler.excess_ms)


def without_side_effects(stragglers: Sequence[Straggler]) -> list[Straggler]:
    """Drop the causes of a rank that are small against its largest one."""
    largest: dict[int, float] = {}
    for straggler in stragglers:
        largest[straggler.rank] = max(straggler.excess_ms, largest.get(straggler.rank, 0.0))
    return [s for s in stragglers if s.excess_ms >= SHARED.minor_ratio * largest[s.rank]]


def _steady(
    timings: Timings, ranks: Ints, cause: Cause, values: Matrix, own: tuple[Matrix, Matrix], policy: StragglerPolicy
) -> Iterator[tuple[int, Straggler]]:
    """(row, straggler) of ranks that are slow in most steps; `own`: all own work of the peers, and of each rank."""
    of_peers, of_rank = own
    excess_ms = values - others_median(values)
    by_row: dict[int, list[Segment]] = {}
    for segment in find_segments(excess_ms / of_peers, policy.persistence):
        if outlasts_bursts(timings, segment, policy):
            by_row.setdefault(segment.row, []).append(segment)
    for segment in find_changes(excess_ms / of_peers, values, of_rank, policy.change):
        if outlasts_bursts(timings, segment, policy):
            by_row.setdefault(segment.row, [segment])
    for row, segments in by_row.items():
        straggler = measured(timings, (ranks, row), cause, segments, excess_ms)
        if is_significant(straggler):
            yield row, straggler


def _in_one_place(
    timings: Timings, peers: Ints, own: tuple[Matrix, Matrix], policy: StragglerPolicy
) -> Iterator[tuple[int, Straggler]]:
    """(row, straggler) of ranks that are slow in one small phase or gap, above whose noise it shows.

    Work that only moved there from another place costs nothing.
    """
    whole, together = own
    total_excess_ms = together - others_median(together)
    clear = replace(policy.change, min_effect_ratio=policy.persistence.min_effect_ratio)
    best: dict[int, tuple[float, Straggler]] = {}
    for place in timings.places("compute"):
        values = complete(timings.own[place][peers])
        if is_large(values, together, policy):
            continue
        excess_ms = values - others_median(values)
        with_rest = with_median_rest(values, together)
        found = find_segments(excess_ms / whole, policy.persistence)
        found += find_changes(excess_ms / whole, values, with_rest, clear)
        for segment in found:
            row, at = segment.row, slice(segment.begin, segment.end)
            if (
                _has_moved(excess_ms[row, at], total_excess_ms[row, at])
                or not outlasts_bursts(timings, segment, policy)
                or segment.effect <= best.get(row, (0.0,))[0]
            ):
                continue
            straggler = replace(measured(timings, (peers, row), "compute", [segment], excess_ms), found_in=place)
            if is_significant(straggler):
                best[row] = (segment.effect, straggler)
    yield from ((row, straggler) for row, (_, straggler) in best.items())


def _has_moved(in_place_ms: Vector, in_all_ms: Vector) -> bool:
    """Decide whether the rank's other work is shorter for sure by a good part of what this place takes longer."""
    others_ms = in_all_ms - in_place_ms
    error_ms = sigma(others_ms) / math.sqrt(max(len(others_ms), 1))
    most_ms = float(np.median(others_ms)) + SHARED.interval_sigmas * error_ms
    return most_ms < -SHARED.explained_ratio * float(np.median(in_place_ms))


def _with_place(known: list[Straggler], in_place: Straggler) -> list[Straggler]:
    """The causes of a rank with the place where it is slow. Where it loses more in the place than in the steps in which
    all of its work shows it, noise of its other work hides the rest of those steps: the place dates it."""
    computing = [one for one in known if one.cause != "data"]
    lost_ms = sum(one.excess_ms * one.num_steps for one in computing)
    if in_place.excess_ms * in_place.num_steps > lost_ms:
        return [in_place, *(one for one in known if one.cause == "data")]
    return [_placed(one, in_place) for one in known]


def _placed(known: Straggler, in_place: Straggler) -> Straggler:
    """Name the place of a slow rank whose other phases are too noisy to tell, if it holds most of the excess."""
    if known.cause == "data" or known.place():
        return known
    holds_most = in_place.excess_ms >= SHARED.agreement_ratio * known.excess_ms
    return replace(known, found_in=in_place.found_in) if holds_most else known


def is_large(values: Matrix, together: Matrix, policy: StragglerPolicy) -> bool:
    """Decide whether a place holds so much of a typical rank's work that its noise is that of all work."""
    usual = np.quantile(values, 0.25, axis=1) / np.maximum(np.quantile(together, 0.25, axis=1), 1e-3)
    # Of two ranks the lesser: the median would hold the slow rank itself.
    return bool(np.quantile(usual, 0.5, method="lower") > policy.small_place_ratio)


def with_median_rest(values: Matrix, together: Matrix) -> Matrix:
    """Work in one place with all other work at its median: what its noise is in all of the work."""
    rest = np.median(together, axis=1, keepdims=True) - np.median(values, axis=1, keepdims=True)
    with_rest: Matrix = values + np.maximum(rest, 0.0)
    return with_rest


def _is_explained(pauses: Segment, excess_ms: Matrix, steady: list[Straggler]) -> bool:
    """Decide whether most of what a rank loses by pauses lies where it is slow in most steps anyway."""
    slow = np.zeros(len(excess_ms), dtype=bool)
    for segment in (segment for straggler in steady for segment in straggler.segments):
        slow[segment.begin : segment.end] = True
    lost = excess_ms[pauses.begin : pauses.end]
    return bool(lost[slow[pauses.begin : pauses.end]].sum() >= SHARED.agreement_ratio * lost.sum())


def outlasts_bursts(timings: Timings, segment: Segment, policy: StragglerPolicy) -> bool:
    """Decide whether it lasted for longer than another job's burst, in seconds: steps may be short."""
    at = slice(segment.begin, segment.end)
    step_s = float(np.mean(np.nanmedian(complete(timings.duration[:, at]), axis=0))) / 1e3
    return num_steps_of(timings.steps, segment) * step_s >= segment.num_required * policy.burst_step_s


def is_significant(straggler: Straggler) -> bool:
    """Decide whether it costs enough of a step."""
    share = straggler.excess_ms / max(straggler.step_ms, 1e-6)
    return straggler.excess_ms >= SHARED.min_excess_ms and share >= SHARED.min_share_ratio


def places_of(timings: Timings, cause: Cause) -> tuple[str, ...]:
    """Phases and gaps, those of the cause first."""
    own = timings.places(cause)
    return (*own, *(place for place in timings.own if place not in own))


def num_steps_of(steps: Ints, segment: Segment) -> int:
    """Number of steps that a segment's observations stand for: a very long run is downsampled."""
    own = steps[segment.begin : segment.end]
    return 1 + int(np.maximum(np.diff(own), 1).sum())


def step_before_ms(timings: Timings, slow: Straggler) -> float | None:
    """Median step (ms) before a rank became slow: without the rank the run is no faster. None without a history."""
    begin = slow.segments[0].begin
    if begin < SHARED.history:
        return None
    return float(np.median(np.nanmedian(complete(timings.duration[:, :begin]), axis=0)))


def within_step_growth(timings: Timings, slow: Straggler) -> Straggler:
    """Bound the excess of a device that waits for its host by the growth of the step. Where the step did not grow, the
    device was idle before, too: it waited for other ranks then, and waits for its host now."""
    before_ms = step_before_ms(timings, slow)
    if before_ms is None or slow.excess_ms <= 0 or slow.step_ms - before_ms >= slow.excess_ms:
        return slow
    grown_ms = max(slow.step_ms - before_ms, 0.0)
    share = grown_ms / slow.excess_ms
    return replace(slow, excess_ms=grown_ms, factor=1 + (slow.factor - 1) * share)


def complete(values: Matrix) -> Matrix:
    """Fill holes (a rank without a row of the observation) with the median of the others, which is neutral."""
    holes = np.isnan(values)
    if not holes.any():
        return values
    columns = np.flatnonzero(holes.any(axis=0))
    filled = values.copy()
    for column in columns:
        there = values[~holes[:, column], column]
        filled[holes[:, column], column] = np.median(there) if len(there) else 0.0
    return filled


def measured(
    timings: Timings,
    place: tuple[Ints, int],
    cause: Cause,
    segments: list[Segment],
    excess_ms: Matrix,
    paused_ratio: float = 0.0,
) -> Straggler:
    """Numbers of a slow rank; `place`: rows of the peers, and which of them it is."""
    peers, row = place
    typical = np.mean if paused_ratio else np.median
    segments = sorted(segments, key=lambda segment: segment.begin)
    index = np.concatenate([np.arange(segment.begin, segment.end) for segment in segments])
    factors, excesses = {}, {}
    for phase in places_of(timings, cause):
        values = complete(timings.own[phase][np.ix_(peers, index)])
        baseline = others_median(values)[row]
        mine, theirs = float(typical(values[row])), float(typical(baseline))
        excesses[phase] = float(typical(values[row] - baseline))
        factors[phase] = mine / theirs if theirs > 1e-3 else float("inf") if mine > 1e-3 else 1.0
    whole = complete(sum(timings.own[phase][np.ix_(peers, index)] for phase in timings.own))
    baseline = others_median(whole)[row]
    per_rank = typical(excess_ms[:, index], axis=1)
    excess = float(per_rank[row])
    next_slowest = float(np.max(np.delete(per_rank, row), initial=0.0))
    # Ranks in lockstep take the same time; where whole steps differ they are not, and the slowest is the job's.
    of_ranks = np.nanmax if WHOLE_STEP in timings.own else np.nanmedian
    step_ms = float(typical(of_ranks(complete(timings.duration[np.ix_(peers, index)]), axis=0)))
    gain = max(0.0, excess - max(0.0, next_slowest))
    waits = complete(timings.wait[np.ix_(peers, index)])
    return Straggler(
        rank=int(timings.ranks[peers[row]]),
        cause=cause,
        segments=tuple(segments),
        first_step=int(timings.steps[segments[0].begin]),
        last_step=int(timings.steps[segments[-1].end - 1]),
        factor=float(typical(whole[row] / np.maximum(baseline, 1e-3))),
        excess_ms=excess,
        step_ms=step_ms,
        step_without_ms=max(step_ms - gain, step_ms * 0.01),
        phase_factors=factors,
        phase_excess_ms=excesses,
        peers_wait_more_ms=float(typical(others_median(waits)[row] - waits[row])),
        num_steps=sum(num_steps_of(timings.steps, segment) for segment in segments),
        ongoing=segments[-1].ongoing,
        paused_ratio=paused_ratio,
    )
