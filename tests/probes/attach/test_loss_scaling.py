"""fp16 in a user's loop: losses as the model gave them, the scale of each step, skipped steps as steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analyzers.diagnose import diagnose
from probes.attach.attach import attach, detach
from probes.attach.auto_attach import auto_attach
from probes.tape.rundir import RunDir
from store import Store

NUMERICS = ("non_finite", "loss_spike", "divergence", "loss_scale_collapse")


@pytest.fixture(autouse=True)
def detached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RANKSCOPE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    real = torch.amp.GradScaler.scale, torch.amp.GradScaler.step
    yield
    detach()
    assert (torch.amp.GradScaler.scale, torch.amp.GradScaler.step) == real


def rows(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    with Store.open(RunDir(run_dir)) as store:
        return store.rows(sql)


class Fp16Loop:
    """A loop as torch's documents write it; gradients of the steps in `overflowing` hold an Inf."""

    def __init__(self, *, fused: bool = False, **scaler: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", **scaler)
        self.losses: list[float] = []

    def run(self, steps: int, *, overflowing: tuple[int, ...] = (), clips: bool = True, micro: int = 1) -> None:
        for step in range(1, steps + 1):
            self.optimizer.zero_grad()
            total = 0.0
            for _ in range(micro):
                x = torch.randn(8, 4)
                loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean() / micro
                total += loss.item()
                self.scaler.scale(loss).backward()
            self.losses.append(total)
            if step in overflowing:
                assert self.model.weight.grad is not None
                self.model.weight.grad[0, 0] = math.inf
            if clips:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()


@pytest.mark.parametrize(
    ("by", "clips", "fused"),
    [("two lines", True, False), ("no line", False, False), ("no line", True, True), ("two lines", False, True)],
)
def test_losses_are_unscaled_and_a_skipped_step_is_a_step(tmp_path: Path, by: str, clips: bool, fused: bool) -> None:
    loop = Fp16Loop(fused=fused, init_scale=65536.0, growth_interval=4)
    run = tmp_path / "run"
    if by == "two lines":
        attach(loop.model, loop.optimizer, run_dir=run, watch=False)
    else:
        auto_attach(run_dir=run, watch=False)
    loop.run(12, overflowing=(1, 2, 7), clips=clips, micro=2)
    detach()
    found = rows(run, "SELECT step, loss, local_loss, committed, grad_norm FROM steps ORDER BY step")
    assert [row[0] for row in found] == list(range(1, 13))
    assert [row[1] for row in found] == pytest.approx(loop.losses, rel=1e-6)
    assert [row[2] for row in found] == pytest.approx(loop.losses, rel=1e-6)
    assert [row[0] for row in found if row[3] is False] == [1, 2, 7]
    assert all(row[4] < 100 for row in found if row[3]), "norms are those of unscaled gradients"
    scales = rows(run, "SELECT step, value FROM scalars WHERE name = 'loss_scale' ORDER BY step")
    halves = [65536.0, 32768.0, *[16384.0] * 4, 32768.0, *[16384.0] * 4, 32768.0]
    assert scales == list(enumerate(halves, start=1))


def test_growth_and_a_skipped_step_now_and_then_are_healthy_and_a_collapse_is_not(tmp_path: Path) -> None:
    loop = Fp16Loop(init_scale=1024.0, growth_interval=20)
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "healthy", watch=False)
    loop.run(150, overflowing=(1, 2, 130))
    detach()
    with Store.open(RunDir(tmp_path / "healthy")) as store:
        fired = [finding for finding in diagnose(store, {}).findings if finding.status == "fired"]
    assert [finding.kind for finding in fired if finding.kind in NUMERICS] == []


def test_an_endless_sequence_of_overflows_is_a_collapse(tmp_path: Path) -> None:
    loop = Fp16Loop(init_scale=2.0**16)
    attach(loop.model, loop.optimizer, run_dir=tmp_path / "run", watch=False)
    loop.run(130, overflowing=tuple(range(110, 118)))
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        fired = [finding for finding in diagnose(store, {}).findings if finding.status == "fired"]
    (collapse,) = [finding for finding in fired if finding.kind == "loss_scale_collapse"]
    assert (collapse.first_step, collapse.last_step) == (110, 117)
    assert (collapse.evidence["scale_before"], collapse.evidence["scale_after"]) == (2.0**16, 2.0**8)
    assert [finding.kind for finding in fired if finding.kind in NUMERICS] == ["loss_scale_collapse"]


class DynamicLossScaler:
    """The methods of DeepSpeed's that its optimizers call, as in `deepspeed.runtime.fp16.loss_scaler` of 0.19."""

    def __init__(self, scale: float) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale /= 2


def test_a_scaler_of_deepspeeds_that_is_imported_after_attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "deepspeed" / "runtime" / "fp16"
    package.mkdir(parents=True)
    (package / "loss_scaler.py").write_text(
        f"from {__name__} import DynamicLossScaler\nclass LossScalerBase(DynamicLossScaler): pass\n"
        "for name in ('scale_loss', 'update_scale'):\n"
        "    setattr(LossScalerBase, name, vars(DynamicLossScaler)[name])\n"
        "DynamicLossScaler = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.fp16.loss_scaler"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    module: ModuleType = __import__("deepspeed.runtime.fp16.loss_scaler", fromlist=["x"])
    scaler, losses = module.LossScalerBase(256.0), []
    for step in range(1, 5):
        loss = model(torch.ones(2, 4)).square().mean()
        losses.append(loss.item())
        scaler.scale_loss(loss).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scaler.loss_scale
        scaler.update_scale(step == 2)
        if step != 2:
            optimizer.step()
        optimizer.zero_grad()
    detach()
    found = rows(tmp_path / "run", "SELECT step, loss, committed FROM steps ORDER BY step")
    assert found == [(step, pytest.approx(losses[step - 1]), step != 2) for step in range(1, 5)]
    scales = rows(tmp_path / "run", "SELECT value FROM scalars WHERE name = 'loss_scale' ORDER BY step")
    assert scales == [(256.0,), (256.0,), (128.0,), (128.0,)]
