"""Onset and end of a rank that computes more than its peers, from its CPU time.

    slow = with_cpu_segments(source, timings, slow, peers=[0, 1, 2], policy)     # slow.first_step: 60 instead of 58

Other jobs delay steps in wall time. A delay right before the onset makes the onset appear earlier, and quiet steps make
it appear later, or make the slowness appear to be over. Other jobs hardly change the CPU time of steps.

1. The excess of a step is its CPU time / the peers' median - 1.
2. It is searched like wall times: for lasting excess (`persistence`), otherwise for a smaller change (`change_point`).
3. What is found replaces the rank's slow steps by wall time if it shares steps with them. The slowness is over only if
   the wall time of later steps also shows less than half of the excess.
4. If the excess grew gradually, its onset is earlier (`first_rise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analyzers.account.timings import Matrix, Timings, load_timings
from analyzers.policy import SHARED
from analyzers.robust import others_median
from analyzers.source import Source
from analyzers.stragglers.comparison.change_point import find_changes
from analyzers.stragglers.comparison.corroboration import some_peers
from analyzers.stragglers.comparison.cpu_comparison import cpu_times
from analyzers.stragglers.comparison.peer_comparison import Straggler, num_steps_of
from analyzers.stragglers.comparison.persistence import Segment, find_segments
from analyzers.stragglers.onsets.place_onset import dated_at, first_rise, of_place
from analyzers.stragglers.policy import StragglerPolicy

__all__ = ["from_first_step", "to_newest_step", "with_cpu_segments", "without_delays"]


def with_cpu_segments(
    source: Source, timings: Timings, slow: Straggler, peers: Sequence[int], policy: StragglerPolicy
) -> Straggler:
    """Set the steps in which a rank is slow to those in which its CPU time exceeds its peers'; unchanged if no such
    steps are found."""
    rows = np.flatnonzero(np.isin(timings.ranks, [slow.rank, *some_peers(peers, slow.rank)]))
    cpu_ms = cpu_times(source, timings, rows)
    if cpu_ms is None:
        return slow
    own = int(np.flatnonzero(timings.ranks[rows] == slow.rank)[0])
    of_others: Matrix = np.maximum(others_median(cpu_ms), 1e-3).astype(np.float32)
    excess = cpu_ms / of_others - 1

    def spans_in(found: list[Segment]) -> list[tuple[int, int, bool]]:
        shared = (p for p in found if any(p.begin < one.end and one.begin < p.end for one in slow.segments))
        return sorted((part.begin, part.end, part.ongoing) for part in shared if part.row == own)

    spans = spans_in(find_segments(excess, policy.persistence))
    spans = spans or spans_in(find_changes(excess, cpu_ms, cpu_ms, policy.change))
    if not spans:
        return slow
    segments = tuple(replace(slow.segments[0], begin=begin, end=end, ongoing=ongoing) for begin, end, ongoing in spans)
    end, is_ongoing = segments[-1].end, segments[-1].ongoing
    if slow.ongoing and not is_ongoing:
        wall_ms = timings.compute[rows]
        later_ms = float(np.median((wall_ms - others_median(wall_ms))[own, end:]))
        is_ongoing = slow.by_cpu or later_ms >= SHARED.explained_ratio * slow.excess_ms
    dated = replace(slow, segments=segments, last_step=int(timings.steps[end - 1]), ongoing=is_ongoing)
    return dated_at(timings, dated, first_rise(excess[own], segments[0].begin, np.ones(excess.shape[1], dtype=bool)))


def without_delays(timings: Timings, slow: Straggler, peers: Sequence[int], core_waits: Matrix | None) -> Straggler:
    """Drop the first segment if it is a wait for a core and the next segment is not."""
    if core_waits is None or not slow.has_peers or slow.cause != "compute" or len(slow.segments) < 2:
        return slow
    first, second = (
        _waited_ratio(timings, slow, peers, (part.begin, part.end), core_waits) for part in slow.segments[:2]
    )
    if first < SHARED.agreement_ratio or second >= SHARED.explained_ratio:
        return slow
    rest = replace(slow, segments=slow.segments[1:])
    return dated_at(timings, rest, rest.segments[0].begin)


def _waited_ratio(
    timings: Timings, slow: Straggler, peers: Sequence[int], span: tuple[int, int], core_waits: Matrix
) -> float:
    """Excess wait for a core / excess time over the peers, in these observations; 0 without an excess."""
    rows = np.flatnonzero(np.isin(timings.ranks, peers))
    own = int(np.flatnonzero(timings.ranks[rows] == slow.rank)[0])
    excess, waited = (
        float(np.sum((values - others_median(values))[own]))
        for values in (matrix[rows][:, slice(*span)] for matrix in (timings.compute, core_waits))
    )
    return waited / excess if excess > 0 else 0.0


def from_first_step(source: Source, timings: Timings, slow: Straggler, peers: Sequence[int]) -> Straggler:
    """Set the rank's onset to the first step of its attempt if no earlier step was faster. Otherwise leave it
    unchanged.

    The start of a segment may lie some steps too late: the comparison leaves warm-up steps out, and a jitter of the
    peers hides the rank's excess in a step. If the rank was slow in all earlier steps, including the warm-up, there is
    no onset. A step before the onset counts as slow if the rank took longer than the peers' usual time after the onset
    by half of its usual excess. In most of these steps the rank must also have been slower than its peers, because
    warm-up slows the peers, too.
    """
    segment = slow.segments[0]
    if not slow.has_peers or slow.paused_ratio or slow.by_cpu or segment.begin > SHARED.history:
        return slow
    if not source.has("steps"):  # the timings are from traces, and there is no run to look into
        return slow
    ((first_of_all,),) = source.rows(
        "SELECT min(step) FROM steps WHERE attempt = ? AND duration_ns IS NOT NULL", [timings.attempt]
    )
    if first_of_all is None or int(timings.steps[0]) - int(first_of_all) > SHARED.warm_up_steps:
        return slow  # the run's first steps were not read: a live analysis reads only the newest ones
    until = int(timings.steps[min(segment.end, segment.begin + SHARED.history) - 1])
    early = load_timings(source, timings.attempt, until_step=until)
    if early is None or (np.diff(early.steps) <= 0).any() or not np.isin(timings.steps[0], early.steps):
        return slow
    if set(peers) - set(early.ranks.tolist()) or not np.isin(list(timings.own), list(early.own)).all():
        return slow
    num_before = int(np.searchsorted(early.steps, timings.steps[segment.begin]))
    rows = np.flatnonzero(np.isin(early.ranks, peers))
    own_row = int(np.flatnonzero(early.ranks[rows] == slow.rank)[0])
    values = of_place(early, slow)[rows]
    own, usual = values[own_row], others_median(values)[own_row]
    level = float(np.median(usual[num_before:]))
    least = float(np.median(own[num_before:] - usual[num_before:])) / 2
    before, excess = own[:num_before], own[:num_before] - usual[:num_before]
    if num_before and (
        least <= 0
        or np.isnan(early.duration[rows, :num_before]).any()
        or (before < level + least).any()
        or np.mean(excess >= least) < SHARED.agreement_ratio
    ):
        return slow
    first = int(early.steps[0])
    return slow if num_before == 0 else replace(dated_at(timings, slow, 0), first_step=first)


def to_newest_step(timings: Timings, slow: Straggler) -> Straggler:
    """If the rank is slow to the end, set its last slow step to the newest step, because noise may hide the excess in
    the last steps.
    """
    if not slow.ongoing:
        return slow
    segments = (*slow.segments[:-1], replace(slow.segments[-1], end=len(timings.steps)))
    lengths = [num_steps_of(timings.steps, part) for part in segments]
    return replace(slow, segments=segments, last_step=int(timings.steps[-1]), num_steps=sum(lengths))
