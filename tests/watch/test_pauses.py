"""A watch that was suspended, as by Slurm or with its machine, does not take that time for silence of the ranks."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.factories import make_run
from tests.watch.test_standstill_loop import Watched
from watch.node_process import END_SIGNALS, Heartbeat, _EndRequest, _tick_on

HOUR_S = 3600.0


@pytest.fixture
def watched(tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Rank 3 computes a long step, in which the others wait for it."""
    where = {rank: {"pid": process.pid} for rank, process in enumerate(processes)}
    return Watched(make_run(tmp_path, steps=20, hang={3: 20}, identities=where), monkeypatch, ranks=processes)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_rest_in_which_everything_was_suspended_is_no_hang(
    watched: Watched, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, tick = [0], watched.loop.tick

    def counted() -> None:
        ticks[0] += 1
        tick()

    def sleep(seconds: float) -> None:
        watched.advance(seconds if ticks[0] > 1 else HOUR_S)

    monkeypatch.setattr(watched.loop, "tick", counted)
    monkeypatch.setattr(watched.loop, "is_needed", lambda: ticks[0] < 2)
    monkeypatch.setattr(time, "sleep", sleep)
    _tick_on(watched.loop, Heartbeat(-1), _EndRequest())
    assert ticks == [2]
    assert watched.tapes.quiet_s < 5, "nor does it confirm another node's verdict"
    assert not watched.said("stacks")
    assert [process.poll() for process in processes] == [None] * 4
    watched.advance(HOUR_S + 30)
    tick()
    assert processes[3].wait(100) == -signal.SIGKILL, "it stands still while the watch runs, too"


def test_records_from_before_a_pause_that_are_read_after_it_do_not_hide_it(
    watched: Watched, processes: list[subprocess.Popen[bytes]]
) -> None:
    watched.advance(HOUR_S)
    watched.loop.skip(HOUR_S)
    watched.loop.tick()
    watched.advance(HOUR_S + 3)
    watched.loop.tick()
    assert not watched.said("stacks")
    watched.advance(HOUR_S + 30)
    watched.loop.tick()
    assert processes[3].wait(100) == -signal.SIGKILL
