"""A job that is suspended during an orderly stop: its ranks keep their time to save."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.tape.pauses import rest_while_running
from tests.trainer.launcher.test_rank_processes import Forked, started
from tests.trainer.launcher.test_stop_signals import _in_c
from tests.waiting import wait_for
from trainer.stop_budget import budget_s

HOUR_S = 3600.0


class _Clock:
    """At 0.5 s everything is suspended for an hour."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        self.now_s = max(end_s, 0.5 + HOUR_S) if self.now_s < 0.5 < end_s else end_s


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Forked]:
    ranks, _ = started(tmp_path)
    yield ranks
    ranks.stop(signal.SIGKILL, 100.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Clock]:
    clock = _Clock()
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: clock.now_s)
        patched.setattr(time, "sleep", clock.sleep)
        yield clock


def test_a_rank_that_saves_keeps_its_grace_period(clock: _Clock) -> None:
    rest_while_running(60.0)
    assert clock.now_s == pytest.approx(HOUR_S + 60.0, abs=1.0)


def test_the_launcher_waits_for_its_ranks(ranks: Forked, clock: _Clock) -> None:
    assert not ranks.wait(60.0)
    assert clock.now_s == pytest.approx(HOUR_S + 60.0, abs=1.0)


def test_the_launch_does_not_end_at_once_after_a_suspension() -> None:
    grace_s = 0.01
    with _in_c(grace_s) as (process, output):
        process.send_signal(signal.SIGTERM)
        assert [output.readline() for _ in range(2)] == [b"announce 15\n", b"report 15\n"]
        process.send_signal(signal.SIGSTOP)
        over_s = time.monotonic() + budget_s(grace_s) + 1.0
        wait_for(lambda: time.monotonic() > over_s, "the end of the budget")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        assert output.readline() == b"end 15: SIGINT was received again.\n"
