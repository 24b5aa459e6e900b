"""Signals of a launcher: reported while its main thread stands in C, ended at once by a second Ctrl-C or in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from tests.trainer.launcher.stop_actions import NoActions
from trainer.launcher.stop_signals import ANNOUNCE_S, REPEAT_S, StopSignals
from trainer.stop_budget import KILL_MARGIN_S, budget_s, rank_grace_s

LAUNCHER = """
import ctypes, signal, sys
from tests.trainer.launcher.stop_actions import NotedActions
from trainer.launcher.stop_signals import StopSignals

with StopSignals(NotedActions(1), grace_s=lambda: float(sys.argv[1])) as stop:
    stop.listen()
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@contextmanager
def _in_c(grace_s: float) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A launcher whose main thread never returns from C: its handlers do not run."""
    command = [sys.executable, "-c", LAUNCHER, str(grace_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process, process.stdout
        finally:
            process.kill()


def test_a_second_ctrl_c_ends_at_once_after_the_verdict() -> None:
    with _in_c(600.0) as (process, output):
        process.send_signal(signal.SIGTERM)
        assert [output.readline() for _ in range(2)] == [b"announce 15\n", b"report 15\n"]
        process.send_signal(signal.SIGTERM)  # of a scheduler that repeats itself: no reason for haste
        time.sleep(REPEAT_S)  # before that it counts as the same Ctrl-C
        process.send_signal(signal.SIGINT)
        assert output.readline() == b"end 15: SIGINT was received again.\n"
        assert process.wait(60) == 128 + signal.SIGTERM


def test_the_launch_ends_when_the_budget_is_spent() -> None:
    with _in_c(0.01) as (process, output):
        process.send_signal(signal.SIGINT)
        assert [output.readline() for _ in range(2)] == [b"announce 2\n", b"report 2\n"]
        assert output.readline() == b"end 2: The run had not ended 5 s after the signal.\n"
        assert process.wait(60) == 128 + signal.SIGINT


class _Told(NoActions):
    def announce(self, number: int) -> None:
        pass

    report = announce


class _Stopped(Exception):
    pass


def _raised(number: int) -> _Stopped:
    return _Stopped(number)


def test_the_main_thread_is_interrupted_once_and_not_where_it_must_not_be() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(_Told(), grace_s=lambda: 600.0) as stop:
        reached = []
        try:
            with stop.raising(_raised):
                with stop.raising(None):
                    os.kill(os.getpid(), signal.SIGTERM)
                    reached.append("the end of what must not be interrupted")
                reached.append("never")
        except _Stopped as stopped:
            assert stopped.args == (signal.SIGTERM,)  # noqa: PT017  (a block that `raises` must be one statement)
            reached.append("the stop")
        assert reached == ["the end of what must not be interrupted", "the stop"]
        with stop.raising(_raised):
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("the end of the stop")
        assert reached[-1] == "the end of the stop"
        left_s = stop.ranks_left_s()
        assert left_s is not None
        assert left_s > 0
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("grace_s", [1.0, 20.0])
def test_ranks_that_are_told_late_keep_their_grace_period(grace_s: float) -> None:
    with StopSignals(_Told(), grace_s=lambda: grace_s) as stop:
        assert stop.ranks_left_s() is None
        os.kill(os.getpid(), signal.SIGTERM)
        stop._began_s = time.monotonic() - ANNOUNCE_S  # recording the stop took as long as it may
        assert stop.ranks_left_s() == rank_grace_s(grace_s) + KILL_MARGIN_S


@pytest.mark.parametrize(("ignored", "is_kept"), [(signal.SIGHUP, True), (signal.SIGINT, False)])
def test_nohup_stays_respected_and_a_background_job_is_stopped(ignored: signal.Signals, is_kept: bool) -> None:
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        with StopSignals(NoActions(), grace_s=lambda: 20.0):
            assert (signal.getsignal(ignored) == signal.SIG_IGN) is is_kept
    finally:
        signal.signal(ignored, before)


@pytest.mark.parametrize("grace_s", [1.0, 10.0, 20.0, 600.0])
def test_the_grace_period_of_ranks_is_within_the_budget(grace_s: float) -> None:
    assert 0 < rank_grace_s(grace_s) < budget_s(grace_s)
    assert grace_s < 14 or budget_s(grace_s) < grace_s
