"""Evaluations that call another module than the one that trains."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from probes.attach.attach import attach, detach
from probes.attach.auto_attach import auto_attach
from probes.tape.rundir import RunDir
from store import Store

NUM_STEPS, EVERY = 6, 3


class Task(nn.Module):
    """A model with its loss, as libraries wrap it for data parallelism."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x).square().mean()
        return loss


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train(task: nn.Module, evaluated: nn.Module, *, fetches_without_gradients: bool = True) -> None:
    """Train `task`, and evaluate `evaluated` after each `EVERY` steps."""
    optimizer = torch.optim.SGD(task.parameters(), lr=0.01)
    held_out = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)
    for step in range(NUM_STEPS):
        task.train()
        task(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            evaluated.eval()
            with torch.set_grad_enabled(not fetches_without_gradients):
                for (x,) in held_out:
                    with torch.no_grad():
                        evaluated(x)


def steps(run_dir: Path) -> list[tuple[int, bool, bool]]:
    with Store.open(RunDir(run_dir)) as store:
        return store.rows("SELECT step, evaluate_ns > 0, forward_ns > 0 FROM steps ORDER BY step")


EXPECTED = [(step, step % EVERY == 0, True) for step in range(1, NUM_STEPS + 1)]


@pytest.mark.parametrize(
    "evaluated",
    [
        lambda task: task.net,
        lambda task: copy.deepcopy(task),
        lambda task: copy.deepcopy(task.net).requires_grad_(False),
        lambda task: AveragedModel(task.net),
        lambda task: Task(task),
    ],
)
def test_a_part_a_copy_or_a_wrapper_of_the_model_evaluates(
    evaluated: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    task = Task(net())
    other = evaluated(task)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    train(task, other)
    detach()
    assert steps(tmp_path / "run") == EXPECTED
    assert not _global_forward_pre_hooks
    assert not any(part._forward_hooks for part in other.modules())


def test_batches_for_the_main_part_in_eval_mode_begin_no_step(tmp_path: Path) -> None:
    """The wrapper is left in the mode of training, and gradients are on while a batch is fetched."""
    task = Task(net())
    auto_attach(run_dir=tmp_path / "run", watch=False)
    train(task, task.net, fetches_without_gradients=False)
    detach()
    assert steps(tmp_path / "run") == EXPECTED


def test_a_call_of_an_unrelated_model_is_not_an_evaluation(tmp_path: Path) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False)
    train(Task(net()), nn.Linear(4, 1))
    detach()
    assert [evaluates for _, evaluates, _ in steps(tmp_path / "run")] == [False] * NUM_STEPS


def test_a_teacher_within_a_step_is_not_an_evaluation(tmp_path: Path) -> None:
    student = net()
    teacher = copy.deepcopy(student).eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for (x,) in DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2):
        with torch.no_grad():
            target = teacher(x)
        (student(x) - target - 1).square().mean().backward()
        optimizer.step()
    detach()
    assert steps(tmp_path / "run") == [(step, False, True) for step in range(1, 5)]


def test_a_pass_without_gradients_in_training_mode_is_training_until_the_update(tmp_path: Path) -> None:
    """Contrastive models cache features of all micro-batches so; here the loop also measures its loss so afterwards."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    for _ in range(3):
        batches = [torch.ones(2, 4), torch.zeros(2, 4)]
        optimizer.zero_grad()
        for place, (x,) in enumerate(DataLoader(TensorDataset(torch.cat(batches)), batch_size=2)):
            batches[place] = x
            with torch.no_grad():
                model(x)
        for x in batches:
            model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(batches[0])
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        found = store.rows("SELECT step, kind, count(*) FROM spans GROUP BY 1, 2 ORDER BY 1, 2")
    kinds = {"backward": 2, "evaluate": 1, "forward": 4, "optimizer": 1}
    assert [row for row in found if row[1] in kinds] == [(step, *one) for step in (1, 2, 3) for one in kinds.items()]


def test_an_evaluation_that_raises_raises_its_own_error(tmp_path: Path) -> None:
    class Broken(Task):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                raise ValueError("broken")
            return super().forward(x)

    task = Task(Broken(net()))
    auto_attach(run_dir=tmp_path / "run", watch=False)
    with pytest.raises(ValueError, match="broken"):
        train(task, task.net)
    train(task, net())
    detach()
    found = steps(tmp_path / "run")
    assert next(step for step, evaluates, _ in found if evaluates) == EVERY


@pytest.mark.parametrize("inner", [True, False])
def test_a_compiled_model_evaluates_without_a_warning_of_torch(inner: bool, tmp_path: Path) -> None:
    model = net()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attach(compiled, optimizer, run_dir=tmp_path / "run", watch=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global hooks.*")
        for step in range(NUM_STEPS):
            model.train()
            compiled(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step % EVERY == EVERY - 1:
                model.eval()
                with torch.no_grad():
                    (model if inner else compiled)(torch.ones(2, 4))
    detach()
    assert steps(tmp_path / "run") == EXPECTED
