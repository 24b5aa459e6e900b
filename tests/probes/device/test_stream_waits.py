"""Waits of the compute stream are stamped, wherever torch makes it wait, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from probes.device.phase_events import PhaseEvents, StampedStep
from probes.device.stream_waits import stamp_waits


class Event:
    """Each comes 1 ms after the one before."""

    made = 0

    def record(self) -> None:
        Event.made += 1
        self.at_ms = float(Event.made)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(file), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stalls(step: Any) -> list[int]:
    """Columns of the waits of a step in which `step(events)` ran."""
    written: list[StampedStep] = []
    events = PhaseEvents(written.append, Event)
    undo = stamp_waits(events)
    try:
        for number in (1, 2):
            events.begin(number)
            step(events)
            events.end(9)
        events.close()
    finally:
        undo()
    return [stall.column for stall in written[-1].stalls if stall.is_wait]


def test_ddps_last_wait_lasts_to_the_end_of_the_backward_pass(group: None) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))

    def step(events: PhaseEvents) -> None:
        events.enter(1)
        loss = model(torch.randn(2, 4)).sum()
        events.leave(2)
        events.enter(3)
        loss.backward()
        events.leave(4)

    assert stalls(step) == [4]

    def without_reduction(events: PhaseEvents) -> None:
        with model.no_sync():
            step(events)

    assert stalls(without_reduction) == []


def test_collectives_of_every_kind_are_waits(group: None) -> None:
    def step(events: PhaseEvents) -> None:
        events.enter(1)
        dist.all_reduce(torch.ones(3))
        events.leave(2)
        events.enter(3)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        work.wait()
        events.leave(4)
        events.enter(5)
        functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD))
        events.leave(6)

    assert stalls(step) == [2, 4, 6]


def test_waits_of_other_streams_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream for copies or collectives may wait for the one that computes: nothing stands still there."""
    monkeypatch.setattr(torch.cuda.Event, "wait", lambda event, stream=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: "compute")

    def step(events: PhaseEvents) -> None:
        events.enter(1)
        torch.cuda.Event.wait(object(), "compute")
        torch.cuda.Event.wait(object(), "copies")
        events.leave(2)

    assert stalls(step) == [2]


def test_everything_is_as_it_was(group: None, tmp_path: Path) -> None:
    places = (
        (dist.Work, "wait"), (functional, "wait_tensor"), (torch.autograd, "backward"), (torch.cuda.Event, "wait"),
        (nn.parallel.DistributedDataParallel, "forward"),
    )  # fmt: skip
    before = [getattr(*place) for place in places]
    undo = stamp_waits(PhaseEvents(lambda step: None, Event))
    assert all(getattr(*place) is not real for place, real in zip(places, before, strict=True))
    undo()
    assert [getattr(*place) for place in places] == before
    assert stamp_waits(None)() is None
