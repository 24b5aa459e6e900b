"""The launcher's keeper of `watch`: one that is stopped or ends again and again is started anew."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probes.attach.launch import watch_restarts
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK, RunDir
from store.database import WriterLock
from tests.factories import empty_run
from tests.waiting import wait_for
from trainer.launcher.node import Node
from trainer.launcher.watch_keeper import WatchKeeper


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(watch_restarts, "UNSEEN_S", math.inf)  # clocks that a test sets forward are no suspension
    run = empty_run(tmp_path)
    run.node_dir(0).mkdir(parents=True)
    return run


@pytest.fixture
def keeper(run: RunDir) -> Iterator[WatchKeeper]:
    keeper = WatchKeeper(run, Node(nproc=1), EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK))
    yield keeper
    keeper.ending = True
    keeper.process.kill()
    keeper.process.wait(100)


def said(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.node_dir(0) / "events.jsonl")[0] if event["kind"] == kind]


def test_a_watch_that_was_stopped_is_replaced(
    run: RunDir, keeper: WatchKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beats() -> bool:
        keeper.check()
        return keeper._watch._limit_s == watch_restarts.SILENT_S

    wait_for(beats, "sign of life")
    stopped = keeper.process
    os.kill(stopped.pid, signal.SIGSTOP)
    keeper.check()
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + watch_restarts.SILENT_S + 1)
    wait_for(lambda: keeper.check() or keeper.process is not stopped, "another watch")
    assert stopped.returncode == -signal.SIGKILL
    (event,) = said(run, "watch_replaced")
    assert (event["pid"], "did not answer" in event["reason"]) == (stopped.pid, True)


def test_a_watch_that_ends_again_and_again_continues_without_node_exporters(
    run: RunDir, keeper: WatchKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_restarts, "RESTART_S", 0.0)
    for number in range(watch_restarts.MAX_QUICK_ENDS):
        ended = keeper.process
        ended.kill()
        ended.wait(100)
        keeper.check()
        assert keeper.process is not ended
        assert keeper.is_bare == (number == watch_restarts.MAX_QUICK_ENDS - 1)
    arguments = Path(f"/proc/{keeper.process.pid}/cmdline")
    wait_for(lambda: b"--bare" in arguments.read_bytes(), "option")
    assert "without exporters" in said(run, "watch_replaced")[-1]["reason"]


def test_a_watch_that_found_another_at_work_is_started_once_that_ends(
    run: RunDir, keeper: WatchKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_restarts, "RESTART_S", 0.0)
    keeper.process.kill()
    keeper.process.wait(100)
    with contextlib.closing(WriterLock(run.store(0), role="watch")):
        keeper.check()
        gave_way = keeper.process
        assert gave_way.wait(100) == watch_restarts.WATCHED_ALREADY
        for _ in range(2 * watch_restarts.MAX_QUICK_ENDS):
            keeper.check()
        assert keeper.process is gave_way
    keeper.check()
    assert keeper.process is not gave_way
    assert not keeper.is_bare
    assert len(said(run, "watch_replaced")) == 2


def test_a_start_without_a_sign_of_life_gives_the_next_one_twice_the_time(
    keeper: WatchKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine so busy that a watch needs 100 s to begin had every one killed at 90 s."""
    now, late_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now() + late_s)
    for times in (1, 2, 4):
        assert keeper._watch._limit_s == times * watch_restarts.STARTING_S
        started = keeper.process
        os.kill(started.pid, signal.SIGSTOP)  # before it has imported anything
        late_s += keeper._watch._limit_s + 1
        keeper.check()
        assert keeper.process is not started
