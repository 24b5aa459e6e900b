"""Processor time of analyzers, which a crowded machine lengthens."""

from __future__ import annotations

import time

from analyzers.live import LiveState
from analyzers.stragglers.comparison.peer_comparison import find_stragglers
from tests.analyzers.rank_timings import Slow, simulate
from tests.analyzers.stragglers.test_straggler import named, stored
from tests.analyzers.test_live import told


def test_live_analysis_is_cheap_enough_for_every_second() -> None:
    store = stored(simulate(4, ranks=8, steps=2000))
    store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "world_size": 8} for rank in range(8)])
    now_ns = store.rows("SELECT max(start_ns) FROM steps")[0][0]
    state = LiveState()
    start = time.process_time()
    told(store, state, now_ns, ticks=10)
    assert (time.process_time() - start) / 10 < 0.2


def test_large_runs_are_analyzed_in_seconds() -> None:
    timings = simulate(9, ranks=256, steps=4000, faults=[Slow(rank=200, step=3000, factor=1.1)])
    start = time.process_time()
    assert named(find_stragglers(timings)) == [(200, "compute")]
    assert time.process_time() - start < 5  # 1 s
