"""Onset of a rank that is slow in one place, from that phase or gap alone, or between two stamped steps of a GPU.

    slow = with_place_onset(timings, slow, peers, core_waits)      # slow.first_step: 26 instead of 41

A slow rank is detected in all of its work, whose noise on a busy machine may hide the first slow steps. If one phase or
gap holds the excess and had none before, that place gives the onset.

1. The time in the place over the median of the peers', in ms, up to the segment's end; its level is the segment's. If
   known, the time that the rank waited for a core longer than its peers is subtracted, because other jobs may delay a
   rank for many steps before it computes more, or sleeps. In that case a rank that is slow everywhere is dated by all
   of its computing.
2. The onset is where the sum of (excess - level / 2) from there on is largest, as in `persistence`; each observation
   counts for one level at most, and for nothing where the rank or all of its peers were not measured.
3. It is used only if few observations before it reach half of the level, and most of those from it to the detected
   start do, which shows a rise and not noise of the place.

On GPUs whose short steps are stamped one in N, calls are recorded in every step: how long the peers waited for the rank
dates the rise between the last stamped step that was not slow and the first that was (`with_unstamped_onset`). It
begins where they wait for more than halfway between the waits of these two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analyzers.account.timings import Matrix, Timings
from analyzers.policy import SHARED
from analyzers.robust import complete, others_median
from analyzers.source import Source
from analyzers.stragglers.comparison.arrivals import waits_ms
from analyzers.stragglers.comparison.peer_comparison import Straggler, num_steps_of

__all__ = ["dated_at", "with_place_onset", "with_unstamped_onset"]


def with_place_onset(
    timings: Timings, slow: Straggler, peers: Sequence[int], core_waits: Matrix | None = None
) -> Straggler:
    """Set the start of the rank's first segment to the step at which the time in its place rose; unchanged if no place
    holds the excess, or if noise of the place itself hides the rise. `core_waits` in ms, by rank of `timings` and
    observation.
    """
    place = slow.place()
    is_everywhere = place not in timings.own
    if (is_everywhere and core_waits is None) or not slow.has_peers or slow.paused_ratio or slow.by_cpu:
        return slow
    segment = slow.segments[0]
    rows = np.flatnonzero(np.isin(timings.ranks, peers))
    of_place = timings.compute if is_everywhere else timings.own[place]
    values = of_place[rows][:, : segment.end]
    own = int(np.flatnonzero(timings.ranks[rows] == slow.rank)[0])
    is_compared = ~np.isnan(values[own]) & ~np.isnan(np.delete(values, own, axis=0)).all(axis=0)
    values = complete(values)
    excess = values[own] - others_median(values)[own]
    reach = SHARED.min_steps
    if core_waits is not None:
        reach = max(reach, (segment.end - segment.begin) // 2)  # use at least half of the segment for the level
        waits = core_waits[rows][:, : segment.end]
        waited = np.maximum(0.0, waits[own] - others_median(waits)[own])
        excess -= np.minimum(waited, np.maximum(0.0, excess))
    level = float(np.median(excess[segment.begin :]))
    votes = np.where(is_compared, np.clip(excess, 0.0, level) - level / 2, 0.0)
    latest = min(segment.begin + reach, segment.end - SHARED.trend_values)
    begin = int(np.argmax(np.cumsum(votes[::-1])[::-1][: latest + 1])) if latest >= 0 else segment.begin
    before, between = excess[:begin], excess[begin : segment.begin][is_compared[begin : segment.begin]]
    if level <= 0 or len(before) < SHARED.trend_values:
        return slow
    if float(np.mean(before >= level / 2)) > SHARED.minor_ratio:
        return slow
    if len(between) and float(np.mean(between >= level / 2)) < SHARED.agreement_ratio:
        return slow
    return dated_at(timings, slow, begin)


def dated_at(timings: Timings, slow: Straggler, begin: int) -> Straggler:
    """Set the start of the rank's first segment to an observation."""
    segments = (replace(slow.segments[0], begin=begin), *slow.segments[1:])
    return replace(
        slow,
        segments=segments,
        first_step=int(timings.steps[begin]),
        num_steps=sum(num_steps_of(timings.steps, part) for part in segments),
    )


def with_unstamped_onset(source: Source, timings: Timings, slow: Straggler, peers: Sequence[int]) -> Straggler:
    """Set the rank's onset to the step from which on its peers wait for it; unchanged if every step was measured."""
    begin = slow.segments[0].begin
    if begin == 0 or slow.first_step != int(timings.steps[begin]) or not source.has("collectives"):
        return slow
    last_good, first_bad = int(timings.steps[begin - 1]), int(timings.steps[begin])
    if first_bad - last_good <= 1:
        return slow
    others = [rank for rank in peers if rank != slow.rank]
    waited = waits_ms(source, timings.attempt, others, slow.rank, last_good, first_bad)
    halfway = (waited.get(first_bad, 0.0) + waited.get(last_good, 0.0)) / 2
    if waited.get(first_bad, 0.0) <= halfway:
        return slow
    onset = first_bad
    while onset - 1 > last_good and waited.get(onset - 1, 0.0) > halfway:
        onset -= 1
    return replace(slow, first_step=onset)
