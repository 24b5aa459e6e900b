"""Calls on a GPU, with a device that is played: nothing is waited for, and each record is written once."""

from __future__ import annotations

from dataclasses import dataclass, field

from probes.collectives.cuda_timing import MAX_PENDING, DeviceCalls


@dataclass
class Device:
    """A stream whose clock is set by hand."""

    now_ms: float = 0.0
    passed_ms: float = -1.0
    made: int = 0
    marks: list[float] = field(default_factory=list)

    def event(self) -> Event:
        self.made += 1
        return Event(self)


@dataclass(eq=False)
class Event:
    device: Device
    at_ms: float = -1.0

    def record(self) -> None:
        self.at_ms = self.device.now_ms

    def query(self) -> bool:
        return self.device.passed_ms >= self.at_ms

    def elapsed_time(self, other: Event) -> float:
        assert self.query(), "asked for a time that has not passed: on a device this raises"
        assert other.query()
        return other.at_ms - self.at_ms


@dataclass(eq=False)
class Call:
    issue_ns: int
    start: Event
    place: int = -1


def _calls(device: Device) -> tuple[DeviceCalls, list[tuple[int, int]]]:
    finished: list[tuple[int, int]] = []
    calls = DeviceCalls(
        lambda call, end_ns, wait_ns: finished.append((end_ns - call.issue_ns, wait_ns)),
        lambda call, nonfinite: None,
        device.event,
    )
    return calls, finished


def test_duration_and_wait_are_the_devices() -> None:
    device = Device()
    calls, finished = _calls(device)
    call = Call(issue_ns=5_000_000, start=calls.mark())
    device.now_ms = 3.0
    before = calls.mark()
    device.now_ms = 10.0
    calls.passed(call, before, calls.mark())
    calls.collect()
    assert finished == []  # the device is not there yet, and nobody waits for it
    device.passed_ms = 10.0
    calls.collect()
    assert finished == [(10_000_000, 7_000_000)]
    calls.collect()
    assert len(finished) == 1


def test_events_are_used_again() -> None:
    device = Device()
    calls, finished = _calls(device)
    for step in range(100):
        device.now_ms = float(step)
        call = Call(issue_ns=0, start=calls.mark())
        calls.passed(call, call.start, calls.mark())
        device.passed_ms = device.now_ms
        calls.collect()
    assert len(finished) == 100
    assert device.made == 2


def test_calls_that_share_the_end_of_a_backward() -> None:
    device = Device()
    calls, finished = _calls(device)
    first = Call(issue_ns=0, start=calls.mark())
    device.now_ms = 1.0
    second = Call(issue_ns=0, start=calls.mark())
    before = calls.mark()
    device.now_ms = 4.0
    after = calls.mark()
    calls.passed(first, after, after, shared=True)
    calls.passed(second, before, after, shared=True)
    device.passed_ms = 4.0
    calls.collect()
    assert finished == [(4_000_000, 0), (3_000_000, 3_000_000)]


def test_a_device_that_never_answers_costs_bounded_memory() -> None:
    device = Device()
    calls, finished = _calls(device)
    for _ in range(MAX_PENDING + 50):
        call = Call(issue_ns=0, start=calls.mark())
        calls.passed(call, call.start, calls.mark())
    assert len(calls.pending) == MAX_PENDING
    assert device.made <= 2 * MAX_PENDING + 4
    assert finished == []
