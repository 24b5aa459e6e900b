"""Slow ranks in a live run whose nodes are read at times of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analyzers.account.timings import Matrix, Timings
from analyzers.robust import complete
from analyzers.stragglers.comparison.peer_comparison import find_stragglers
from tests.analyzers.rank_timings import Slow, simulate


def _without_newest(timings: Timings, rank: int, steps: int) -> Timings:
    """The same before the last rows of a rank have arrived."""
    recorded = np.ones(timings.duration.shape, dtype=bool)
    recorded[rank, -steps:] = False

    def filled(values: Matrix) -> Matrix:
        return complete(np.where(recorded, values, np.nan).astype(np.float32))

    own = {place: filled(values) for place, values in timings.own.items()}
    return replace(timings, own=own, wait=filled(timings.wait), duration=filled(timings.duration), recorded=recorded)


@pytest.mark.parametrize("late", [2, 0])
def test_a_rank_whose_node_reports_late_is_still_slow(late: int) -> None:
    """Each node's records arrive at times of its own: the newest steps of one are those of all others for seconds."""
    whole = simulate(3, ranks=4, steps=200, faults=[Slow(rank=2, step=61, factor=1.5)])
    lag_s = 30 * float(np.median(whole.duration)) / 1e3
    late_run = _without_newest(whole, late, 30)
    (found,) = find_stragglers(late_run.until_all_have(2 * lag_s))
    assert (found.rank, found.ongoing, found.last_step) == (2, True, 170)
    assert len(late_run.until_all_have(lag_s / 2).steps) == 200, "a rank that has left is not waited for"
    assert whole.until_all_have(lag_s) is whole
