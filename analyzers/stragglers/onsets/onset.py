"""Onset of a rank that computes more than its peers, from its CPU time.

    slow = with_onset(source, timings, slow, peers=[0, 1, 2], policy)     # slow.first_step: 60 instead of 58

Other jobs delay steps in wall time. A delay right before the onset makes the onset appear earlier, and a quiet step
after the onset makes it appear later. Other jobs hardly change the CPU time of steps.

1. The excess of a step is its CPU time / the peers' median - 1.
2. The onset is searched within `min_steps` observations of the onset by wall time. On each side, the next `min_steps`
   observations give the level before or after. The search extends to half of the segment if the rank's longer wait
   for a core explains `explained_ratio` of its excess up to the later onset.
3. The onset is where the sum of (excess - level) from there on is largest, as in `persistence`. This level lies between
   the levels before and after, equally far in units of each one's noise, since longer times vary more.
4. The onset is used only if the levels differ by at least `sure_sigmas` times a single step's noise.
5. If the excess grew gradually, its onset is earlier (`first_rise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analyzers.account.timings import Matrix, Timings, load_timings
from analyzers.policy import SHARED
from analyzers.robust import complete, difference_sigma, others_median
from analyzers.source import Source, floats, ints
from analyzers.stragglers.comparison.corroboration import some_peers
from analyzers.stragglers.comparison.peer_comparison import Straggler, num_steps_of
from analyzers.stragglers.onsets.place_onset import dated_at, first_rise, of_place, with_growth
from analyzers.stragglers.policy import StragglerPolicy

__all__ = ["from_first_step", "to_newest_step", "with_onset", "without_delays"]


def with_onset(
    source: Source,
    timings: Timings,
    slow: Straggler,
    peers: Sequence[int],
    policy: StragglerPolicy,
    core_waits: Matrix | None = None,
) -> Straggler:
    """Set the start of the rank's first segment to the rise of its CPU time; unchanged if that is unclear."""
    dated = _with_cpu_onset(source, timings, slow, peers, policy, core_waits)
    begin = dated.segments[0].begin
    steps = timings.steps[: begin + SHARED.min_steps]
    excess = None
    if (np.diff(steps) > 0).all():
        excess = _cpu_excess(source, timings.attempt, [slow.rank, *some_peers(peers, slow.rank)], steps.tolist())
    if excess is None:
        return with_growth(timings, dated, peers, core_waits)
    return dated_at(timings, dated, first_rise(excess, begin, np.ones(len(excess), dtype=bool)))


def _with_cpu_onset(
    source: Source,
    timings: Timings,
    slow: Straggler,
    peers: Sequence[int],
    policy: StragglerPolicy,
    core_waits: Matrix | None,
) -> Straggler:
    reach = SHARED.min_steps
    if core_waits is not None:
        half = (slow.segments[0].end - slow.segments[0].begin) // 2
        late = _dated(source, timings, slow, peers, policy, max(reach, half))
        delayed = (slow.segments[0].begin, late.segments[0].begin)
        if _waited_ratio(timings, slow, peers, delayed, core_waits) >= SHARED.explained_ratio:
            return late
    return _dated(source, timings, slow, peers, policy, reach)


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
        float(np.nansum((values - others_median(values))[own]))
        for values in (matrix[rows][:, slice(*span)] for matrix in (timings.compute, core_waits))
    )
    return waited / excess if excess > 0 else 0.0


def _dated(
    source: Source, timings: Timings, slow: Straggler, peers: Sequence[int], policy: StragglerPolicy, late: int
) -> Straggler:
    """Set the onset from CPU time, at most `late` observations after the onset by wall time."""
    segment, reach = slow.segments[0], SHARED.min_steps
    first, last = max(0, segment.begin - 2 * reach), min(segment.end, segment.begin + late + reach)
    steps = timings.steps[first:last]
    if (
        segment.begin - first < reach + SHARED.trend_values
        or last - segment.begin < 2 * SHARED.trend_values
        or (np.diff(steps) <= 0).any()
    ):
        return slow  # there are too few steps, or steps were repeated and the CPU times of their executions are mixed
    excess = _cpu_excess(source, timings.attempt, [slow.rank, *some_peers(peers, slow.rank)], steps.tolist())
    if excess is None:
        return slow
    low, high = segment.begin - reach - first, min(segment.begin + late - first, len(steps) - SHARED.trend_values)
    before, after = float(np.median(excess[:low])), float(np.median(excess[high:]))
    noise, noise_after = (
        max(difference_sigma(part), policy.change.min_noise_ratio) for part in (excess[:low], excess[high:])
    )
    if after - before < SHARED.sure_sigmas * noise:
        return slow
    level = before + (after - before) * noise / (noise + noise_after)
    votes = np.clip(excess, before, after) - level
    gains = np.cumsum(votes[low:][::-1])[::-1]
    return dated_at(timings, slow, first + low + int(np.argmax(gains[: high - low])))


def _cpu_excess(source: Source, attempt: int, ranks: list[int], steps: list[int]) -> Matrix | None:
    """CPU time of the first rank / median of the others - 1, by step; None if any step lacks it."""
    table = source.query(
        f"""
        SELECT rank, step, arg_max(cpu_ns, start_ns) AS cpu_ns FROM steps
        WHERE attempt = ? AND step BETWEEN ? AND ? AND duration_ns IS NOT NULL AND cpu_ns > 0
          AND rank IN ({", ".join(map(str, ranks))}) GROUP BY rank, step
        """,
        [attempt, steps[0], steps[-1]],
    )
    values: Matrix = np.full((len(ranks), len(steps)), np.nan, dtype=np.float32)
    row_of, column_of = ({value: i for i, value in enumerate(known)} for known in (ranks, steps))
    for rank, step, cpu_ns in zip(ints(table["rank"]), ints(table["step"]), floats(table["cpu_ns"]), strict=True):
        if int(step) in column_of:
            values[row_of[int(rank)], column_of[int(step)]] = cpu_ns
    if len(ranks) < 2 or np.isnan(values).any():
        return None
    excess: Matrix = values[0] / others_median(values)[0] - 1
    return excess


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
    own, usual = values[own_row], others_median(complete(values))[own_row]
    level = float(np.median(usual[num_before:]))
    least = float(np.nanmedian(own[num_before:] - usual[num_before:])) / 2
    before, excess = own[:num_before], own[:num_before] - usual[:num_before]
    if num_before and (
        least <= 0
        or np.isnan(values[:, :num_before]).any()
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
