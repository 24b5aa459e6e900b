"""Onset of a slow rank: from the one phase or gap in which it is slow, or between two stamped steps of a GPU.

    slow = with_place_onset(timings, slow, peers, core_waits)      # slow.first_step: 26 instead of 41

A slow rank is detected in all of its work. On a busy machine, noise may hide the first slow steps. If one phase or gap
(the place) holds the excess and had none before, this place gives the onset.

1. The excess is the time in the place minus the peers' median, in ms, up to the segment's end. The level is the
   median excess in the segment. If waits for a core are known, the rank's wait beyond its peers' is subtracted: other
   jobs may delay a rank for many steps before the rank computes more, or sleeps. In this case, a rank that is slow
   everywhere is dated by all of its computing.
2. The onset is the observation from which the sum of (excess - level / 2) is largest, as in `persistence`. Each
   excess is clipped to [0, level]. An observation counts for nothing if the rank or all its peers were not measured.
3. The onset is used only if half of the level is reached by few observations before it, and by most from it to the
   detected start. Otherwise the excess may be noise of the place.

A growing excess reaches half of its level long after its onset. `with_growth` sets the onset to the first rise.

If a GPU's steps are short, only one in N is stamped, but calls are recorded in every step. The onset lies between the
last stamped step that was not slow and the first slow one. It is the step after which the peers always wait for the
rank longer than the mean of their waits in both steps (`with_unstamped_onset`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from analyzers.account.timings import Matrix, Timings
from analyzers.policy import SHARED
from analyzers.robust import difference_sigma, others_median
from analyzers.source import Source
from analyzers.stragglers.comparison.arrivals import waits_ms
from analyzers.stragglers.comparison.peer_comparison import Straggler, num_steps_of

__all__ = ["dated_at", "first_rise", "of_place", "with_growth", "with_place_onset", "with_unstamped_onset"]

Booleans = npt.NDArray[np.bool_]


def with_place_onset(
    timings: Timings, slow: Straggler, peers: Sequence[int], core_waits: Matrix | None = None
) -> Straggler:
    """Set the start of the rank's first segment to the step at which the time in its place rose; unchanged if no place
    holds the excess, or if noise of the place itself hides the rise. `core_waits` in ms, by rank of `timings` and
    observation.
    """
    is_everywhere = slow.place() not in timings.own
    if (is_everywhere and core_waits is None) or not slow.has_peers or slow.paused_ratio or slow.by_cpu:
        return slow
    segment = slow.segments[0]
    excess, is_compared = _place_excess(timings, slow, peers, core_waits)
    reach = SHARED.min_steps
    if core_waits is not None:
        reach = max(reach, (segment.end - segment.begin) // 2)  # use at least half of the segment for the level
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


def with_growth(timings: Timings, slow: Straggler, peers: Sequence[int], core_waits: Matrix | None = None) -> Straggler:
    """Set the rank's onset to where its time in the place, or all its computing, first rose; see `first_rise`."""
    if not slow.has_peers or slow.paused_ratio or slow.by_cpu:
        return slow
    excess, is_compared = _place_excess(timings, slow, peers, core_waits)
    return dated_at(timings, slow, first_rise(excess, slow.segments[0].begin, is_compared))


def first_rise(excess: Matrix, begin: int, is_compared: Booleans) -> int:
    """The observation at which an excess began to rise, if it grew gradually to its level at observation `begin`;
    otherwise `begin`.

    An excess that grows reaches half of its final level long after its onset. The onset moves back to an earlier rise
    as long as most of the `min_steps` observations before `begin` exceed the level before them, by `sure_sigmas` times
    a single step's noise and by a substantial part of the excess after them.
    """
    reach = SHARED.min_steps
    places = np.flatnonzero(is_compared)
    values = excess[places]
    onset = int(np.searchsorted(places, begin))
    while onset - reach >= SHARED.history:
        before = values[: onset - reach]
        usual = float(np.median(before))
        rise = float(np.median(values[onset - reach : onset])) - usual
        level = float(np.median(values[onset : onset + reach])) - usual
        if rise < max(SHARED.sure_sigmas * difference_sigma(before), SHARED.minor_ratio * level):
            break
        votes = np.clip(values[:onset] - usual, 0.0, rise) - rise / 2
        gains = np.cumsum(votes[::-1])[::-1]
        onset = SHARED.history + int(np.argmax(gains[SHARED.history :]))
    return begin if onset >= len(places) else min(begin, int(places[onset]))


def _place_excess(
    timings: Timings, slow: Straggler, peers: Sequence[int], core_waits: Matrix | None
) -> tuple[Matrix, Booleans]:
    """Return (excess over the peers in ms, whether the rank and a peer were measured), by observation up to the end of
    the first segment, for the place that holds the rank's excess, or for all work of its cause."""
    rows = np.flatnonzero(np.isin(timings.ranks, peers))
    values = of_place(timings, slow)[rows][:, : slow.segments[0].end]
    own = int(np.flatnonzero(timings.ranks[rows] == slow.rank)[0])
    is_known = ~np.isnan(timings.duration[rows][:, : slow.segments[0].end])
    is_compared = is_known[own] & np.delete(is_known, own, axis=0).any(axis=0)
    excess: Matrix = values[own] - others_median(values)[own]
    if core_waits is not None:
        waits = core_waits[rows][:, : slow.segments[0].end]
        waited = np.maximum(0.0, waits[own] - others_median(waits)[own])
        excess -= np.minimum(waited, np.maximum(0.0, excess))
    return excess, is_compared


def of_place(timings: Timings, slow: Straggler) -> Matrix:
    """The time in the place that holds the rank's excess, or in all work of its cause."""
    if (place := slow.place()) in timings.own:
        return timings.own[place]
    return timings.own["data"] if slow.cause == "data" else timings.compute


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
    """Set the rank's onset to the step at which its peers begin to wait for it, unless every step was measured."""
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
