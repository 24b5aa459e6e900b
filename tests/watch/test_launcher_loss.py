"""`watch` records that a launcher is gone, kills the ranks that do not end, and closes the run."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.tape import event_kinds
from tests.factories import RankWriter, make_run
from tests.stand_ins import stand_ins
from tests.watch.test_standstill_loop import Watched


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A launcher and two ranks."""
    started = stand_ins(tmp_path, 3)
    yield started
    for process in started:
        process.kill()
        process.wait(100)


def _watched(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, launcher_pid: int
) -> Watched:
    where = {rank: {"pid": process.pid} for rank, process in enumerate(processes[1:])}
    patient = {"recovery": {"hang_floor_s": 3600}}  # the silence of the ranks is no hang here
    run = make_run(tmp_path, ranks=2, steps=3, hang={1: 3}, identities=where, config=patient)
    return Watched(run, monkeypatch, launcher_pid=launcher_pid, ranks=processes[1:])


def test_ranks_that_stay_are_killed_and_the_run_is_closed(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, *ranks = processes
    watched = _watched(tmp_path, processes, monkeypatch, launcher.pid)
    watched.loop.tick()
    assert not watched.said("launcher_lost")
    launcher.kill()
    launcher.wait()
    watched.loop.tick()
    (lost,) = watched.said("launcher_lost")
    assert (lost["pid"], lost["ranks"]) == (launcher.pid, [0, 1])
    assert [rank.poll() for rank in ranks] == [None, None]
    watched.advance(25)  # grace_s is 20
    watched.loop.tick()
    assert [rank.wait(100) for rank in ranks] == [-signal.SIGKILL] * 2
    assert [event["exit_rank"] for event in watched.said("rank_stopped")] == [0, 1]
    watched.loop.tick()
    watched.loop.tick()
    (ended,) = watched.said("run_ended")
    assert ended["reason"] == "launcher_lost"
    assert len(watched.said("launcher_lost")) == 1
    assert not watched.loop.is_needed()


def test_ranks_of_another_launcher_are_left_alone(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, *ranks = processes
    watched = _watched(tmp_path, processes, monkeypatch, 0)
    launcher.kill()
    launcher.wait()
    watched.loop.tick()
    watched.advance(25)
    watched.loop.tick()
    assert [rank.poll() for rank in ranks] == [None, None]
    assert not watched.said("launcher_lost")


def test_a_run_resumed_under_the_same_watch_has_the_new_launcher(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, *ranks = processes
    gone = subprocess.Popen(["true"])
    gone.wait()
    watched = _watched(tmp_path, processes, monkeypatch, gone.pid)
    watched.events.write(event_kinds.RUN_STARTED, node_rank=0, launcher_pid=launcher.pid)
    RankWriter(watched.run, 0, attempt=1, identity={"pid": ranks[0].pid})
    watched.loop.tick()
    watched.advance(25)
    watched.loop.tick()
    assert not watched.said("launcher_lost")
    assert [rank.poll() for rank in ranks] == [None, None]
