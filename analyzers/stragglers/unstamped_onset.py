"""Onset of a slow rank on GPUs whose short steps are stamped one in N: the step between two stamped ones.

    slow = with_unstamped_onset(source, timings, slow, peers)      # slow.first_step: 41 instead of 44

Calls are recorded in every step, so how long the peers waited for the rank dates the rise between the last stamped
step that was not slow and the first that was: it begins where they wait for more than halfway between the waits of
these two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analyzers.account.timings import Timings
from analyzers.source import Source
from analyzers.stragglers.arrivals import waits_ms
from analyzers.stragglers.peer_comparison import Straggler

__all__ = ["with_unstamped_onset"]


def with_unstamped_onset(source: Source, timings: Timings, slow: Straggler, peers: Sequence[int]) -> Straggler:
    """The rank with the step from which its peers wait for it; unchanged where every step was measured."""
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
