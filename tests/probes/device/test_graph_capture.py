"""While a CUDA graph is captured no probe touches the device; its replays are events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from probes import gradients, step_scalars
from probes.device.graph_replays import record_replays
from probes.gradients import GradientProbe
from probes.step_scalars import StepScalars
from probes.tape.events import read_events
from probes.tape.format.writer import COMPLETE
from probes.tape_recorder import TapeRecorder
from tests.probes.recorded_world import rows


class NotYet:
    """An event that must not be asked: a query ends the capture."""

    def query(self) -> bool:
        raise AssertionError("asked during a capture")

    synchronize = query


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")
    return TapeRecorder(tmp_path, rank=0, attempt=0)


def _no_device_work(*_: object) -> Any:
    raise AssertionError("work of ours in the graph")


def test_no_probe_work_is_captured(recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        loss = torch.empty((), device="cuda")
    model = nn.Linear(2, 2)
    probe = GradientProbe(recorder, model.named_parameters(), interval=1)
    values = StepScalars(recorder)
    reading = step_scalars._Reading(0)
    reading.values, reading.arrived = [(("loss",), torch.zeros(()))], NotYet()
    values._in_flight.append(reading)
    probe._in_flight.append(gradients._Reading(0, [0], torch.zeros(2, 1), NotYet()))
    model(torch.ones(1, 2)).sum().backward()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(StepScalars, "_copied", _no_device_work)
    monkeypatch.setattr(gradients, "read_back", _no_device_work)
    monkeypatch.setattr(gradients, "_norms", _no_device_work)
    with recorder.step(1):
        values.put(loss=loss, tokens=7)
        values.flush()
        probe.after_backward(1)
        assert probe.norms() == {}
    (row,) = rows(recorder.directory, "steps")
    assert (row["state"], row["loss"], row["tokens"]) == (COMPLETE, None, 7)


def test_replays_are_events(recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        replayed = 0

        def replay(self) -> None:
            self.replayed += 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    real = Graph.replay
    undo = record_replays(recorder)
    first, second = Graph(), Graph()
    for graph in (first, first, second, first):
        graph.replay()
    undo()
    assert Graph.replay is real
    first.replay()
    assert (first.replayed, second.replayed) == (4, 1)
    recorder.close()
    events = read_events(recorder.directory / "events.jsonl")[0]
    found = [(e["graph"], e["replays"]) for e in events if e["kind"] == "graph_replays"]
    assert found == [(1, 1), (2, 1), (1, 3), (2, 1)]
