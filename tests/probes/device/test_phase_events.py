"""Steps on a played GPU: the host runs ahead, so its times are no times of phases, and nothing is waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from probes import step_scalars
from probes.device.phase_events import MAX_MARKS, PhaseEvents
from probes.step_clock import GAPS
from probes.tape.writer import COMPLETE, OPEN
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
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.captures)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    return stream


def _step(recorder: TapeRecorder, number: int, stream: Stream) -> None:
    """The host enqueues all of it in no time; the device needs 4 + 8 + 2 ms, and 1 ms before each."""
    with recorder.step(number):
        with recorder.span("data"):
            pass
        for phase, took in zip(PHASES, (4.0, 8.0, 2.0), strict=True):
            stream.now_ms += 1.0
            with recorder.span(phase):
                stream.now_ms += took
        stream.now_ms += 1.0


def test_a_rank_alone_on_its_gpu_has_the_devices_times(tmp_path: Path, stream: Stream) -> None:
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0, device="cuda:0")
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
        assert [row[f"{phase}_ns"] for phase in PHASES] == [4_000_000, 8_000_000, 2_000_000]
        assert [row[f"{gap}_ns"] for gap in GAPS] == [1_000_000] * 4
        assert row["collective_wait_ns"] == 0  # there is nobody to wait for
    assert stream.recorded == 3 * 10
    assert stream.made <= 2 * 10  # they are used again


def test_of_several_ranks_on_gpus_phases_and_waits_are_not_measured(tmp_path: Path, stream: Stream) -> None:
    """All waiting stood in "optimizer", where the host reads a number back, and waits were 0."""
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0, world_size=8, device="cuda:0")
    _step(recorder, 1, stream)
    recorder.close()
    (row,) = rows(tmp_path, "steps")
    not_measured = [f"{phase}_ns" for phase in PHASES] + [f"{gap}_ns" for gap in GAPS]
    not_measured += [name for name in row if name.endswith("_wait_ns")]
    assert {name: row[name] for name in not_measured} == dict.fromkeys(not_measured)
    assert row["data_ns"] is not None
    assert row["duration_ns"] > 0
    assert stream.recorded == 0
    assert {span["wait_ns"] for span in rows(tmp_path, "spans")} == {None}


def test_a_captured_step_records_no_event_on_the_stream(tmp_path: Path, stream: Stream) -> None:
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0, device="cuda:0")
    _step(recorder, 1, stream)
    stream.captures = True
    _step(recorder, 2, stream)
    stream.captures = False
    recorder.close()
    first, second = rows(tmp_path, "steps")
    assert (first["forward_ns"], second["forward_ns"]) == (4_000_000, None)
    assert second["state"] == COMPLETE


def test_a_step_of_many_microbatches_is_left_out(stream: Stream) -> None:
    written: list[Any] = []
    events = PhaseEvents(lambda step, times: written.append(step))
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
                stream.now_ms += 3.0
            values.put(grad_norm=on_device)
        values.flush()
    stream.passed_ms = stream.now_ms
    with recorder.step(3):
        pass
    assert [row["state"] for row in rows(tmp_path, "steps")] == [OPEN, OPEN, COMPLETE]  # phases are there
    values.flush()
    found = rows(tmp_path, "steps")[:2]
    assert [(row["state"], row["forward_ns"], row["loss"], row["grad_norm"]) for row in found] == [
        (COMPLETE, 3_000_000, 1.0, 1.0)
    ] * 2
    recorder.close()
