"""Steps on a played GPU: the host runs ahead, so its times are no times of phases, and nothing is waited for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from probes import step_scalars
from probes.device import phase_events
from probes.device.phase_events import MAX_MARKS, SKIPPED, PhaseEvents, StampedStep
from probes.step_clock import GAPS
from probes.tape.format.writer import COMPLETE, OPEN
from probes.tape_recorder import TapeRecorder
from tests.probes.recorded_world import rows

PHASES = ("forward", "backward", "optimizer")


class Stream:
    """A stream whose clock (ms) is set by hand; `passed_ms` is how far the device has come."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.passed_ms = -1.0
        self.made = self.recorded = 0
        self.captures = False

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at_ms = stream, -1.0

    def record(self) -> None:
        assert not self.stream.captures, "it would become a part of the graph"
        self.stream.recorded += 1
        self.at_ms = self.stream.now_ms

    def query(self) -> bool:
        return self.stream.passed_ms >= self.at_ms

    def synchronize(self) -> None:
        self.stream.passed_ms = self.stream.now_ms

    def elapsed_time(self, other: Event) -> float:
        assert self.query(), "asked for a time that has not passed: on a device this raises"
        assert other.query()
        return other.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: stream.event())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.captures)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    return stream


def _step(recorder: TapeRecorder, number: int, stream: Stream) -> None:
    """The host enqueues all of it in no time; the device needs 40 + 80 + 20 ms, and 10 ms before each."""
    with recorder.step(number):
        with recorder.span("data"):
            pass
        for phase, took in zip(PHASES, (40.0, 80.0, 20.0), strict=True):
            stream.now_ms += 10.0
            with recorder.span(phase):
                stream.now_ms += took
        stream.now_ms += 10.0


@pytest.mark.parametrize("world_size", [1, 8])
def test_a_rank_on_a_gpu_has_the_devices_times(tmp_path: Path, stream: Stream, world_size: int) -> None:
    """Of several ranks nothing was measured, and before that all waiting stood in "optimizer"."""
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0, world_size=world_size, device="cuda:0")
    _step(recorder, 1, stream)
    (row,) = rows(tmp_path, "steps")
    assert row["state"] == OPEN  # its times are still on their way
    _step(recorder, 2, stream)
    assert rows(tmp_path, "steps")[0]["state"] == OPEN  # nothing waited for the device
    stream.passed_ms = stream.now_ms
    _step(recorder, 3, stream)
    recorder.close()
    found = rows(tmp_path, "steps")
    assert [row["state"] for row in found] == [COMPLETE] * 3
    for row in found:
        assert [row[f"{phase}_ns"] for phase in PHASES] == [40_000_000, 80_000_000, 20_000_000]
        assert [row[f"{gap}_ns"] for gap in GAPS] == [10_000_000] * 4
        assert row["duration_ns"] == 180_000_000
        assert row["collective_wait_ns"] == 0
        assert row["stamped_steps"] == 1
    assert stream.recorded == 3 * 10
    assert stream.made <= 2 * 10  # they are used again


def test_waits_of_the_stream_are_parts_of_their_phase_or_gap(tmp_path: Path, stream: Stream) -> None:
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0, world_size=8, device="cuda:0")
    assert recorder.stamps is not None
    with recorder.step(1):
        with recorder.span("forward"):
            stream.now_ms += 50.0
            recorder.stamps.enter_wait()
            recorder.stamps.enter_wait()  # one that is made of another counts once
            stream.now_ms += 30.0
            recorder.stamps.leave_wait()
            recorder.stamps.leave_wait()
        recorder.stamps.enter_wait()
        stream.now_ms += 5.0
        recorder.stamps.leave_wait()
        with recorder.span("backward"):
            stream.now_ms += 60.0
            recorder.stamps.enter_wait()  # DDP's last one: the end of the pass ends it
            stream.now_ms += 20.0
        with recorder.span("optimizer"):
            stream.now_ms += 10.0
    recorder.close()
    (row,) = rows(tmp_path, "steps")
    assert [row[f"{name}_ns"] / 1e6 for name in (*PHASES, "forward_to_backward", "duration")] == [80, 80, 10, 5, 175]
    assert [row[f"{name}_wait_ns"] / 1e6 for name in (*PHASES, "forward_to_backward")] == [30, 20, 0, 5]
    assert row["collective_wait_ns"] == 55_000_000
    stalls = [stall for stall in rows(tmp_path, "device_stalls") if stall["waits_for"] == "communication"]
    assert [(stall["place"], stall["end_ns"] - stall["start_ns"]) for stall in stalls] == [
        ("forward", 30_000_000), ("forward_to_backward", 5_000_000), ("backward", 20_000_000),
    ]  # fmt: skip


def test_a_stamp_that_runs_at_once_tells_a_late_host(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host sleeps for 200 ms before the forward pass while its device has 60 ms of work left, and runs dry."""
    host_ms = 0.0
    monkeypatch.setattr(phase_events, "_monotonic_ns", lambda: round(host_ms * 1e6))
    written: list[StampedStep] = []
    events = PhaseEvents(written.append)
    stream.passed_ms = 1e9
    for step in (1, 2):
        events.begin(step)
        if step == 2:
            host_ms += 200.0
            stream.now_ms = max(stream.now_ms, host_ms)
        events.enter(0)
        stream.now_ms += 60.0  # the host enqueues it at once
        events.leave(1)
        events.end(2)
    events.close()
    first, second = written
    assert first.places[1].late_ns == 0
    assert second.places[0].late_ns == second.places[0].total_ns == 140_000_000
    assert second.places[1].late_ns == 0
    (stall,) = second.stalls
    assert (stall.is_wait, stall.start_ns, stall.end_ns) == (False, 60_000_000, 200_000_000)


def test_of_short_steps_every_nth_is_stamped(tmp_path: Path, stream: Stream) -> None:
    """And the record says that the others are left to it, or they would read as not measured."""
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0, world_size=8, device="cuda:0")
    stream.passed_ms = 1e9
    for number in range(1, 33):
        with recorder.step(number), recorder.span("data"), recorder.span("forward"):
            stream.now_ms += 2.0  # four stamps a step, which cost 6 us
    recorder.close()
    stamped = {row["step"]: row["stamped_steps"] for row in rows(tmp_path, "steps")}
    assert [step for step, stands_for in stamped.items() if stands_for][-6:] == [12, 16, 20, 24, 28, 32]
    assert stamped[28] == 4
    assert stamped[30] == 0
    assert {row["data_ns"] for row in rows(tmp_path, "steps") if not row["stamped_steps"]} == {None}
    events = PhaseEvents(lambda step: None)
    events._interval = 4
    events.begin(7)
    assert events.end(3) is SKIPPED


def test_a_device_that_cannot_be_stamped_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKSCOPE_FAIL_LOUD", raising=False)
    written: list[Any] = []

    def broken() -> Any:
        raise RuntimeError("no driver")

    events = PhaseEvents(written.append, broken)
    for step in (1, 2):
        events.begin(step)
        events.enter(0)
        assert events.end(3) is False
    events.close()
    assert written == []


def test_a_captured_step_records_no_event_on_the_stream(tmp_path: Path, stream: Stream) -> None:
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0, device="cuda:0")
    _step(recorder, 1, stream)
    stream.captures = True
    _step(recorder, 2, stream)
    stream.captures = False
    recorder.close()
    first, second = rows(tmp_path, "steps")
    assert (first["forward_ns"], second["forward_ns"]) == (40_000_000, None)
    assert second["state"] == COMPLETE


def test_a_step_of_many_microbatches_is_left_out(stream: Stream) -> None:
    written: list[Any] = []
    events = PhaseEvents(written.append)
    events.begin(1)
    for _ in range(MAX_MARKS):
        events.enter(1)
        events.leave(2)
    assert not events.end(3)
    assert stream.made == MAX_MARKS
    events.close()
    assert written == []


def test_values_and_phases_that_come_late_complete_a_step_together(
    tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readings of numbers and one of phases keep the record open; it is complete when all have come."""
    monkeypatch.setattr(step_scalars.StepScalars, "_copied", lambda values, value: torch.ones(()))
    on_device = torch.empty((), device="meta")
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0, device="cuda:0")
    values = step_scalars.StepScalars(recorder)
    for number in (1, 2):
        with recorder.step(number):
            values.put(loss=on_device)
            with recorder.span("forward"):
                stream.now_ms += 300.0
            values.put(grad_norm=on_device)
        values.flush()
    stream.passed_ms = stream.now_ms
    with recorder.step(3):
        pass
    assert [row["state"] for row in rows(tmp_path, "steps")] == [OPEN, OPEN, COMPLETE]  # phases are there
    values.flush()
    found = rows(tmp_path, "steps")[:2]
    assert [(row["state"], row["forward_ns"], row["loss"], row["grad_norm"]) for row in found] == [
        (COMPLETE, 300_000_000, 1.0, 1.0)
    ] * 2
    recorder.close()


def test_a_stamp_costs_its_host_little(stream: Stream) -> None:
    """Measured at 0.9 us of CPU without CUDA's own; 1.5 us a stamp is the budget. The best of some rounds counts."""
    stream.passed_ms = 1e9
    events = PhaseEvents(lambda step: None)
    num_stamps, best_us = 98, 1e9
    for number in range(1, 301):
        events._interval = 1
        begun = time.process_time_ns()
        events.begin(number)
        for _ in range((num_stamps - 2) // 4):
            events.enter(1)
            events.enter_wait()
            events.leave_wait()
            events.leave(2)
        events.end(3)
        best_us = min(best_us, (time.process_time_ns() - begun) / num_stamps / 1e3)
    assert best_us < 6  # on a processor that is a few times slower
