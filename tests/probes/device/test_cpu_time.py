"""What the kernel says of a step: a core taken by somebody else is told apart from work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.device import cpu_time as core_time
from probes.device.cpu_time import CoreTime, CoreUse
from probes.tape.format.schema import UNSET

SECONDS = 0.3
UNEXPLAINED_RATIO = 0.15
"""What is neither work nor waiting for a core is next to nothing."""
NONE = int(UNSET["i64"])


def spin(seconds: float) -> None:
    """Busy until so much CPU time of this thread is used."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def used() -> tuple[CoreUse, float]:
    measured, start = CoreTime(), time.monotonic()
    measured.begin()
    spin(SECONDS)
    use = measured.end()
    measured.close()
    return use, time.monotonic() - start


def unexplained_ratio(use: CoreUse, wall_s: float) -> float:
    """Share of the time that was neither work nor waiting for a core."""
    return abs(1 - (use.cpu_ns + use.run_delay_ns) / 1e9 / wall_s)


@pytest.fixture
def one_core() -> Iterator[int]:
    """This thread and what it starts may use one core only."""
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, before)


def test_a_busy_core_shows_as_waiting_and_not_as_work(one_core: int) -> None:
    neighbours = [subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile 1: pass"],
                                   stdout=subprocess.PIPE) for _ in range(2)]  # fmt: skip
    try:
        for neighbour in neighbours:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()
        for _ in range(50):  # a machine that stands still itself for a moment is neither work nor waiting
            use, wall_s = used()
            if unexplained_ratio(use, wall_s) < UNEXPLAINED_RATIO:
                break
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()
    assert use.cpu_ns / 1e9 == pytest.approx(SECONDS, rel=0.2)
    assert wall_s > 1.5 * SECONDS
    assert unexplained_ratio(use, wall_s) < UNEXPLAINED_RATIO


def test_cpu_time_follows_the_thread_that_runs_the_steps() -> None:
    measured, found = CoreTime(), []
    measured.begin()
    measured.end()

    def run() -> None:
        measured.begin()
        spin(0.02)
        found.append(measured.end())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0].cpu_ns >= 15e6
    assert found[0].run_delay_ns >= 0


def test_a_kernel_without_scheduler_statistics_gives_no_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(core_time, "_SCHEDSTAT", str(tmp_path / "nowhere"))
    use, _ = used()
    assert use.run_delay_ns == NONE
    assert use.cpu_ns > 0
