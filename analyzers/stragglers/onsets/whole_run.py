"""First and last step of a rank that was slow for as long as it was seen: from the first step, to the newest.

    slow = from_first_step(source, timings, slow, peers)       # slow.first_step: 1 instead of 9
    slow = to_newest_step(timings, slow)                       # slow.last_step: 200 instead of 199

The begin of a segment may lie some steps too late: the comparison leaves warm-up steps out, and a jitter of the peers
hides the rank's excess in a step. Where the rank was slow in all steps before, warm-up included, there is no onset.
A step before the onset counts as slow if the rank took as long as after it, compared with the peers' usual time there;
in most of them it also took longer than its peers, which warm-up slows as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analyzers.account.timings import Matrix, Timings, load_timings
from analyzers.policy import SHARED
from analyzers.robust import complete, others_median
from analyzers.source import Source
from analyzers.stragglers.comparison.peer_comparison import Straggler, num_steps_of
from analyzers.stragglers.onsets.place_onset import dated_at

__all__ = ["from_first_step", "to_newest_step"]


def from_first_step(source: Source, timings: Timings, slow: Straggler, peers: Sequence[int]) -> Straggler:
    """The rank with the first step of its attempt as its onset, where no step before was better; else unchanged."""
    segment = slow.segments[0]
    if not slow.has_peers or slow.paused_ratio or slow.by_cpu or segment.begin > SHARED.history:
        return slow
    if not source.has("steps"):  # traces have none
        return slow
    ((first_of_all,),) = source.rows(
        "SELECT min(step) FROM steps WHERE attempt = ? AND duration_ns IS NOT NULL", [timings.attempt]
    )
    if first_of_all is None or int(timings.steps[0]) - int(first_of_all) > SHARED.warm_up_steps:
        return slow  # a live analysis reads the newest steps
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
    """The rank with the newest step as its last, where it is slow to the end: a jitter may hide its excess there."""
    if not slow.ongoing:
        return slow
    segments = (*slow.segments[:-1], replace(slow.segments[-1], end=len(timings.steps)))
    lengths = [num_steps_of(timings.steps, part) for part in segments]
    return replace(slow, segments=segments, last_step=int(timings.steps[-1]), num_steps=sum(lengths))


def _of_place(timings: Timings, slow: Straggler) -> Matrix:
    """The time in the place that holds the rank's excess, or in all work of its cause."""
    if (place := slow.place()) in timings.own:
        return timings.own[place]
    return timings.own["data"] if slow.cause == "data" else timings.compute
