"""Onset and end of a slow rank: by CPU time, by the one place that holds its excess, or between stamped steps.

    slow = with_onset(source, timings, slow, peers, counters, policy)     # slow.first_step: 60 instead of 58

A slow rank is detected by the wall time of all of its work. On a busy machine other jobs delay steps: a delay right
before the onset makes the onset appear earlier, and noise may hide the first slow steps.

A rank that computes more is dated by its CPU time, which other jobs hardly change (`_with_cpu_segments`):

1. The excess of a step is its CPU time / the peers' median - 1.
2. It is searched like wall times: for lasting excess (`persistence`), otherwise for a smaller change (`change_point`).
3. What is found replaces the rank's slow steps by wall time if it shares steps with them. The slowness is over only if
   the wall time of later steps also shows less than half of the excess.

Otherwise, if one phase or gap (the place) holds the excess and had none before, this place gives the onset
(`with_place_onset`):

1. The excess is the time in the place minus the peers' median, in ms, up to the segment's end. The level is the
   median excess in the segment. If waits for a core are known, the rank's wait beyond its peers' is subtracted: other
   jobs may delay a rank for many steps before the rank computes more, or sleeps. In this case, a rank that is slow
   everywhere is dated by all of its computing.
2. The onset is the observation from which the sum of (excess - level / 2) is largest, as in `persistence`. Each
   excess is clipped to [0, level]. An observation counts for nothing if the rank or all its peers were not measured.
3. The onset is used only if half of the level is reached by few observations before it, and by most from it to the
   detected start. Otherwise the excess may be noise of the place.

A growing excess reaches half of its level long after its onset: the onset moves to the first rise, or to
where the line of its growth began (`first_rise`).

If a GPU's steps are short, only one in N is stamped, but calls are recorded in every step. The onset lies between the
last stamped step that was not slow and the first slow one. It is the step after which the peers always wait for the
rank longer than the mean of their waits in both steps (`_with_unstamped_onset`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from analyzers.account.time_classes import GAPS
from analyzers.account.timings import Matrix, Timings, load_timings
from analyzers.policy import SHARED
from analyzers.robust import difference_sigma, others_median
from analyzers.source import Source
from analyzers.stragglers.comparison.arrivals import waits_ms
from analyzers.stragglers.comparison.change_point import find_changes
from analyzers.stragglers.comparison.corroboration import Counters, attribute, some_peers
from analyzers.stragglers.comparison.cpu_comparison import core_waits, cpu_excess
from analyzers.stragglers.comparison.peer_comparison import Straggler, num_steps_of
from analyzers.stragglers.comparison.persistence import Segment, find_segments
from analyzers.stragglers.policy import StragglerPolicy

__all__ = ["first_rise", "with_growth", "with_onset", "with_place_onset"]

MAX_LINE = 1000
"""Observations before the level in which a line of growth is searched: a longer search would take seconds."""
Booleans = npt.NDArray[np.bool_]


def with_onset(
    source: Source,
    timings: Timings,
    slow: Straggler,
    peers: Sequence[int],
    counters: Counters,
    policy: StragglerPolicy,
) -> Straggler:
    """Set the first and the last slow step of a rank: from its CPU time if it computes more in all of its work,
    otherwise from the place that holds its excess. `peers`: ranks with the same work, empty if there are none."""
    waits = None if timings.is_on_device else core_waits(source, timings, np.arange(len(timings.ranks)))
    slow = _without_delays(timings, slow, peers, waits)
    if not timings.is_on_device and (always := _from_first_step(source, timings, slow, peers)) is not slow:
        return _to_newest_step(timings, always)
    found = attribute(
        counters, cause=slow.cause, excess_ms=slow.excess_ms, factor=slow.factor, policy=policy.corroboration
    )
    is_work = found.cause == "compute" and found.confirmed and counters.on_cpu
    if is_work and slow.has_peers and not slow.paused_ratio and slow.place not in GAPS:
        dated = _with_cpu_segments(source, timings, slow, peers, policy)
        if dated is not slow:
            return _to_newest_step(timings, dated)
    slow = with_growth(timings, with_place_onset(timings, slow, peers, waits), peers, waits)
    if timings.is_stamped and peers and not slow.paused_ratio:
        slow = _with_unstamped_onset(source, timings, slow, peers)
    return _to_newest_step(timings, slow)


def _with_cpu_segments(
    source: Source, timings: Timings, slow: Straggler, peers: Sequence[int], policy: StragglerPolicy
) -> Straggler:
    """Set the steps in which a rank is slow to those in which its CPU time exceeds its peers'; unchanged if no such
    steps are found."""
    rows = np.flatnonzero(np.isin(timings.ranks, [slow.rank, *some_peers(peers, slow.rank)]))
    if (found := cpu_excess(source, timings, rows)) is None:
        return slow
    cpu_ms, of_others = found
    own, excess = int(np.flatnonzero(timings.ranks[rows] == slow.rank)[0]), cpu_ms / of_others - 1

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
    return _dated_at(timings, dated, first_rise(excess[own], segments[0].begin, np.ones(excess.shape[1], dtype=bool)))


def _without_delays(timings: Timings, slow: Straggler, peers: Sequence[int], waits: Matrix | None) -> Straggler:
    """Drop the first segment if it is a wait for a core and the next segment is not."""
    if waits is None or not slow.has_peers or slow.cause != "compute" or len(slow.segments) < 2:
        return slow
    first, second = (_waited_ratio(timings, slow, peers, (part.begin, part.end), waits) for part in slow.segments[:2])
    if first < SHARED.agreement_ratio or second >= SHARED.explained_ratio:
        return slow
    rest = replace(slow, segments=slow.segments[1:])
    return _dated_at(timings, rest, rest.segments[0].begin)


def _waited_ratio(
    timings: Timings, slow: Straggler, peers: Sequence[int], span: tuple[int, int], waits: Matrix
) -> float:
    """Excess wait for a core / excess time over the peers, in these observations; 0 without an excess."""
    rows = np.flatnonzero(np.isin(timings.ranks, peers))
    own = int(np.flatnonzero(timings.ranks[rows] == slow.rank)[0])
    excess, waited = (
        float(np.sum((values - others_median(values))[own]))
        for values in (matrix[rows][:, slice(*span)] for matrix in (timings.compute, waits))
    )
    return waited / excess if excess > 0 else 0.0


def _from_first_step(source: Source, timings: Timings, slow: Straggler, peers: Sequence[int]) -> Straggler:
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
    values = _of_place(early, slow)[rows]
    own, usual = values[own_row], others_median(values)[own_row]
    level = float(np.median(usual[num_before:]))
    least = float(np.median(own[num_before:] - usual[num_before:])) / 2
    before, excess = own[:num_before], own[:num_before] - usual[:num_before]
    if num_before and (
        least <= 0
        or (early.recorded is not None and not early.recorded[rows, :num_before].all())
        or (before < level + least).any()
        or np.mean(excess >= least) < SHARED.agreement_ratio
    ):
        return slow
    first = int(early.steps[0])
    return slow if num_before == 0 else replace(_dated_at(timings, slow, 0), first_step=first)


def _to_newest_step(timings: Timings, slow: Straggler) -> Straggler:
    """If the rank is slow to the end, set its last slow step to the newest step, because noise may hide the excess in
    the last steps.
    """
    if not slow.ongoing:
        return slow
    segments = (*slow.segments[:-1], replace(slow.segments[-1], end=len(timings.steps)))
    lengths = [num_steps_of(timings.steps, part) for part in segments]
    return replace(slow, segments=segments, last_step=int(timings.steps[-1]), num_steps=sum(lengths))


def with_place_onset(timings: Timings, slow: Straggler, peers: Sequence[int], waits: Matrix | None = None) -> Straggler:
    """Set the start of the rank's first segment to the step at which the time in its place rose; unchanged if no place
    holds the excess, or if noise of the place itself hides the rise. `waits` for a core in ms, by rank of `timings` and
    observation.
    """
    is_everywhere = slow.place not in timings.own
    if (is_everywhere and waits is None) or not slow.has_peers or slow.paused_ratio or slow.by_cpu:
        return slow
    segment = slow.segments[0]
    excess, is_compared = _place_excess(timings, slow, peers, waits)
    reach = SHARED.min_steps
    if waits is not None:
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
    return _dated_at(timings, slow, begin)


def with_growth(timings: Timings, slow: Straggler, peers: Sequence[int], waits: Matrix | None = None) -> Straggler:
    """Set the rank's onset to where its time in the place, or all its computing, first rose; see `first_rise`."""
    if not slow.has_peers or slow.paused_ratio or slow.by_cpu:
        return slow
    excess, is_compared = _place_excess(timings, slow, peers, waits)
    return _dated_at(timings, slow, first_rise(excess, slow.segments[0].begin, is_compared))


def first_rise(excess: Matrix, begin: int, is_compared: Booleans) -> int:
    """The observation at which an excess began to rise, if it grew gradually to its level at observation `begin`;
    otherwise `begin`.

    An excess that grows reaches half of its final level long after its onset. The onset moves back to an earlier rise
    as long as most of the `min_steps` observations before `begin` exceed the level before them, by `sure_sigmas` times
    a single step's noise and by a substantial part of the excess after them. A line of growth may begin even earlier.
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
    onset = _begin_of_line(values, onset, int(np.searchsorted(places, begin)))
    return begin if onset >= len(places) else min(begin, int(places[onset]))


def _begin_of_line(values: Matrix, onset: int, begin: int) -> int:
    """The observation before `onset` from which the values rise in a line; `onset` if no line fits better than levels.

    A slow growth exceeds the noise of a step long after it began, but a line through all of it shows where. It must fit
    better than three levels: before any observation, from there to `begin`, and from `begin` on. The values after
    `begin` are left out, except for the next few, because the growth may have ended.
    """
    reach = SHARED.min_steps
    end = min(len(values), begin + reach)
    moved = max(0, end - MAX_LINE)
    values, first = values[moved:end], onset - moved
    if first <= SHARED.history or len(values) - first < reach:
        return onset
    starts, number = range(SHARED.history, first), np.arange(len(values))

    def from_line(start: int) -> float:
        above, since = values - np.median(values[:start]), np.maximum(0, number - start)
        slope = float(np.median(above[start + reach :] / since[start + reach :]))
        return float(np.abs(above - slope * since).sum())

    def from_levels(start: int) -> float:
        parts = np.split(values, sorted({start, max(start, begin - moved)}))
        return sum(float(np.abs(part - np.median(part)).sum()) for part in parts if len(part))

    distances = [from_line(start) for start in starts]
    if min(distances) >= min(from_levels(start) for start in (*starts, first)):
        return onset
    return moved + starts[int(np.argmin(distances))] + 1


def _place_excess(
    timings: Timings, slow: Straggler, peers: Sequence[int], waits: Matrix | None
) -> tuple[Matrix, Booleans]:
    """Return (excess over the peers in ms, whether the rank and a peer were measured), by observation up to the end of
    the first segment, for the place that holds the rank's excess, or for all work of its cause."""
    rows = np.flatnonzero(np.isin(timings.ranks, peers))
    values = _of_place(timings, slow)[rows][:, : slow.segments[0].end]
    own = int(np.flatnonzero(timings.ranks[rows] == slow.rank)[0])
    is_compared = np.ones(values.shape[1], dtype=bool)
    if timings.recorded is not None:
        is_known = timings.recorded[rows][:, : slow.segments[0].end]
        is_compared = is_known[own] & np.delete(is_known, own, axis=0).any(axis=0)
    excess: Matrix = values[own] - others_median(values)[own]
    if waits is not None:
        waits = waits[rows][:, : slow.segments[0].end]
        waited = np.maximum(0.0, waits[own] - others_median(waits)[own])
        excess -= np.minimum(waited, np.maximum(0.0, excess))
    return excess, is_compared


def _of_place(timings: Timings, slow: Straggler) -> Matrix:
    """The time in the place that holds the rank's excess, or in all work of its cause."""
    if slow.place in timings.own:
        return timings.own[slow.place]
    return timings.own["data"] if slow.cause == "data" else timings.compute


def _dated_at(timings: Timings, slow: Straggler, begin: int) -> Straggler:
    """Set the start of the rank's first segment to an observation."""
    segments = (replace(slow.segments[0], begin=begin), *slow.segments[1:])
    return replace(
        slow,
        segments=segments,
        first_step=int(timings.steps[begin]),
        num_steps=sum(num_steps_of(timings.steps, part) for part in segments),
    )


def _with_unstamped_onset(source: Source, timings: Timings, slow: Straggler, peers: Sequence[int]) -> Straggler:
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
