"""The pace of the thread that writes the store: rarer rounds on small machines, none that waits for long."""

from __future__ import annotations

import os
import threading
import time

import pytest

from watch.records.tick_pace import MAX_REST_S, NICENESS, TICK_S, TickPace, yield_to_ranks


class Clocks:
    """Both clocks that a pace reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.cpu_s = 100.0, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "thread_time", lambda: self.cpu_s)

    def round(self, pace: TickPace, cpu_s: float) -> None:
        with pace.round():
            self.now_s, self.cpu_s = self.now_s + 2 * cpu_s, self.cpu_s + cpu_s


class Waits(threading.Event):
    """An event that is not set, and lets the clock go on instead of waiting."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.clocks = clocks

    def wait(self, timeout: float | None = None) -> bool:
        self.clocks.now_s += timeout or 0.0
        return False


@pytest.mark.parametrize(
    ("num_cores", "cpu_s", "period_s"),
    [(2, 0.01, TICK_S), (2, 0.04, 2.0), (2, 0.2, MAX_REST_S), (8, 0.1, 1.25), (64, 0.2, TICK_S)],
)
def test_a_round_that_costs_more_of_the_cores_is_followed_by_a_longer_rest(
    num_cores: int, cpu_s: float, period_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks, pace = Clocks(monkeypatch), TickPace(num_cores=num_cores)
    clocks.round(pace, cpu_s)
    assert pace.period_s() == pytest.approx(period_s)
    began_s = clocks.now_s - 2 * cpu_s
    pace.rest(Waits(clocks), is_eager=lambda: False)
    assert clocks.now_s - began_s == pytest.approx(period_s, abs=0.1)
    clocks.round(pace, cpu_s)
    assert pace.num_ticks == round(period_s)


def test_where_something_happens_the_next_round_begins_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, pace = Clocks(monkeypatch), TickPace(num_cores=2)
    clocks.round(pace, 0.5)
    looks = iter([False, True])
    before_s = clocks.now_s
    pace.rest(Waits(clocks), is_eager=lambda: next(looks))
    assert clocks.now_s - before_s == pytest.approx(2 * TICK_S)


def test_the_end_is_not_waited_for() -> None:
    pace, stop = TickPace(num_cores=2), threading.Event()
    stop.set()
    pace.rest(stop, is_eager=lambda: pytest.fail("asked after the end"))


def test_a_thread_that_yields_leaves_the_others_as_they_were() -> None:
    found: list[tuple[int, int]] = []

    def run() -> None:
        yield_to_ranks()
        found.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(100)
    assert found == [(max(NICENESS, before), os.SCHED_BATCH)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    assert os.sched_getscheduler(0) != os.SCHED_BATCH
