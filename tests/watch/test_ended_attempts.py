"""How an attempt ended is told from the tapes, although the next one began before the store was written."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from analyzers.finding import Finding
from tests.factories import make_run, still_training
from tests.stand_ins import take_in
from tests.watch.test_standstill_loop import HOUR_NS, Watched


def restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Rank 1 is killed and the next attempt runs before the round after."""
    run = still_training(make_run(tmp_path, steps=20, end=""))
    watched = Watched(run, monkeypatch)
    watched.loop.tick()
    assert watched.said("finding") == []
    watched.events.write("rank_exit", exit_rank=1, pid=10_001, exit_code=-9, signal="SIGKILL", message="")
    make_run(tmp_path, run=run, attempt=1, steps=3, first_step=11, end="")
    still_training(run)
    return watched


def told(watched: Watched) -> list[tuple[Any, ...]]:
    return [
        (event["finding_kind"], event["attempt"], event["finding_ranks"], event["cause"])
        for event in watched.said("finding")
    ]


def test_a_death_is_told_in_the_second_round_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = restarted(tmp_path, monkeypatch)
    watched.loop.tick()
    watched.loop.tick()
    assert told(watched) == [("rank_lost", 0, [1], "signal")]
    assert "Restarted as attempt 1, whose first step is 11." in watched.said("finding")[0]["summary"]
    watched.loop.tick()
    assert len(told(watched)) == 1


def test_a_failed_round_loses_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = restarted(tmp_path, monkeypatch)
    watched.loop.tick()
    with monkeypatch.context() as broken:
        broken.setattr(watched.judge, "ended_findings", lambda source, ended: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            watched.loop.tick()
    watched.loop.tick()
    assert told(watched) == [("rank_lost", 0, [1], "signal")]


def test_an_end_that_cannot_be_judged_delays_no_verdict_on_a_hang(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(still_training(make_run(tmp_path, steps=20, end="")), monkeypatch)
    watched.loop.tick()
    where = {rank: {"pid": process.pid} for rank, process in enumerate(processes)}
    make_run(tmp_path, run=watched.run, attempt=1, steps=20, first_step=21, hang={3: 40}, identities=where)
    take_in(watched.run, processes)

    def fail(source: object, ended: object) -> list[Finding]:
        raise MemoryError("no room")

    monkeypatch.setattr(watched.judge, "ended_findings", fail)
    watched.loop.tick()
    watched.advance(HOUR_NS / 1e9)
    with pytest.raises(MemoryError):
        watched.loop.tick()
    assert [(kind, attempt, ranks) for kind, attempt, ranks, _ in told(watched)] == [("hang", 1, [3])]
