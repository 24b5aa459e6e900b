"""Onset of a slow rank with a host that is late in one phase or gap, from the host's own time in that place.

    slow = with_host_onset(source, timings, slow, "before_forward", peers)      # slow.first_step: 41 instead of 46

The lead of a host, and a slow network, hide the host's first late steps from its device, but the host's spans show
them. The level is the host's median excess over its peers since the device's onset. The host's onset is where the sum
of (excess - level / 2) from there on is largest. It is used only if the level is at least `explained_ratio` of the
rank's excess, and if few earlier steps reach half of the level, as they do on a rank that prints from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analyzers.account.timings import Timings
from analyzers.policy import SHARED
from analyzers.run.records.newest_steps import NEWEST_STEPS
from analyzers.source import Source
from analyzers.stragglers.comparison.corroboration import some_peers
from analyzers.stragglers.comparison.peer_comparison import Straggler
from analyzers.stragglers.slow_place import host_places_by_step

__all__ = ["with_host_onset"]


def with_host_onset(source: Source, timings: Timings, slow: Straggler, place: str, peers: Sequence[int]) -> Straggler:
    """The rank with the first step in which its host is late; unchanged if that place does not show it."""
    others = some_peers(peers, slow.rank)
    if not place or not slow.has_peers or not others or not source.has("spans"):
        return slow
    first, last = slow.first_step - NEWEST_STEPS, min(slow.last_step, slow.first_step + NEWEST_STEPS)
    times = host_places_by_step(source, timings.attempt, [slow.rank, *others], max(first, 0), last, place)
    steps = sorted(step for step, of_rank in times.items() if slow.rank in of_rank and len(of_rank) > 1)
    excess = np.array(
        [own[slow.rank] - np.median([ms for rank, ms in own.items() if rank != slow.rank])
         for own in (times[step] for step in steps)]
    )  # fmt: skip
    begin = int(np.searchsorted(steps, slow.first_step))
    if not 0 < begin < len(steps):
        return slow
    level = float(np.median(excess[begin:]))
    votes = np.clip(excess, 0.0, level) - level / 2
    onset = int(np.argmax(np.cumsum(votes[: begin + 1][::-1])[::-1]))
    before = excess[:onset]
    is_late = level >= SHARED.explained_ratio * slow.excess_ms and level >= SHARED.min_excess_ms
    if not is_late or len(before) < SHARED.trend_values or np.mean(before >= level / 2) > SHARED.minor_ratio:
        return slow
    return replace(slow, first_step=int(steps[onset]))
