"""The times of the newest records come from one monotonic clock, whenever ranks begin and end."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.factories import RankWriter, empty_run
from watch.live_tapes import LiveTapes

HOUR_NS = 3600 * 10**9


def _silent_ns(tapes: LiveTapes) -> int:
    ((newest_ns,),) = tapes.source().rows("SELECT max(wall_ns) FROM events WHERE kind = 'rank'")
    return tapes.read_ns() - int(newest_ns)


def _set_wall_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - HOUR_NS)


def test_a_rank_that_begins_while_its_records_are_read_is_not_silent_for_the_hour_that_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = empty_run(tmp_path)
    tapes = LiveTapes(run)
    _set_wall_clock_back(monkeypatch)
    tapes.poll()
    RankWriter(run, 0)
    assert abs(_silent_ns(tapes)) < HOUR_NS / 2


def test_the_end_of_all_ranks_does_not_change_the_clock_of_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = empty_run(tmp_path)
    tapes = LiveTapes(run)
    _set_wall_clock_back(monkeypatch)
    rank = subprocess.Popen(["sleep", "300"])
    try:
        RankWriter(run, 0, identity={"pid": rank.pid})
        tapes.poll()
        assert abs(_silent_ns(tapes)) < HOUR_NS / 2
    finally:
        rank.kill()
        rank.wait(100)
    tapes.poll()
    assert abs(_silent_ns(tapes)) < HOUR_NS / 2


def test_records_of_ranks_that_had_ended_before_keep_their_times(tmp_path: Path) -> None:
    """Their monotonic clock may have been that of an earlier boot."""
    run = empty_run(tmp_path)
    ended = RankWriter(run, 0, now_ns=HOUR_NS, identity={"pid": 2**22 + 1})
    ended.wall_minus_mono_ns += 24 * HOUR_NS
    ended.event("rank", world_size=1, local_rank=0, node_rank=0, host="node-0", pid=2**22 + 1, device="cpu")
    tapes = LiveTapes(run)
    tapes.poll()
    ((wall_ns,),) = tapes.source().rows("SELECT max(wall_ns) FROM events WHERE kind = 'rank'")
    assert wall_ns == HOUR_NS + ended.wall_minus_mono_ns
