"""Values of a step that are DTensors, as under tensor parallel: over a process group that sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from probes.attach.attach import attach, detach
from probes.attach.loop.step_losses import StepLosses
from probes.step_scalars import StepScalars, read_back
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from store import Store
from tests.probes.recorded_world import rows


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("placement", "expected"), [(Replicate(), 2.5), (Partial("avg"), 2.5), (Partial("sum"), None)])
def test_a_dtensor_counts_as_far_as_this_rank_has_all_of_it(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Placement, expected: float | None
) -> None:
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")
    loss = DTensor.from_local(torch.tensor(2.5), mesh, [placement], run_check=False)
    recorder = TapeRecorder(tmp_path, rank=1, attempt=0, world_size=2)
    values = StepScalars(recorder)
    with recorder.step(1):
        values.put(loss=loss)
    values.flush()
    recorder.close()
    (step,) = rows(tmp_path, "steps")
    assert step["loss"] == expected


def test_a_loss_that_cannot_be_read_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("isinstance(args[0], DTensor)")

    monkeypatch.delenv("RANKSCOPE_FAIL_LOUD", raising=False)
    monkeypatch.setattr(StepLosses, "settle", broken)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    attach(model, optimizer, run_dir=tmp_path / "run")
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    detach()
    with Store.open(RunDir.open(tmp_path / "run")) as store:
        assert store.rows("SELECT count(*) FROM steps WHERE duration_ns > 0") == [(3,)]


def test_values_come_back_to_the_host_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        real = torch.empty  # torch collects the functions that a default device applies to at their first use
        real(1)

    def unpinned(*size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        return real(*size, **options)  # only a machine with a device pins memory

    class Event:
        def record(self) -> None:
            pass

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    values = torch.ones(2)
    with torch.device("meta"):
        copied, _ = read_back(values)
    assert copied.tolist() == [1.0, 1.0]
