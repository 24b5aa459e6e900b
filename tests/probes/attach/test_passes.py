"""Steps with several passes of the model: micro-batches, and passes whose weights differ."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from probes.attach.attach import attach, detach
from probes.attach.auto_attach import auto_attach
from probes.tape.rundir import RunDir
from store import Store

SERIES = ("largest_weight_of_last_pass", "loss_of_first_pass")


def series(run_dir: Path) -> dict[str, list[float]]:
    with Store.open(RunDir(run_dir)) as store:
        found = store.rows("SELECT name, step, value FROM scalars ORDER BY name, step")
    return {name: [value for of, _, value in found if of == name] for name in SERIES}


def train(run_dir: Path, *, perturbs: bool, bad_step: int = -1) -> None:
    """Two passes a step; with `perturbs` the weights move along the gradient between them, and back."""
    model = nn.Linear(4, 1)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(model, optimizer, run_dir=run_dir, watch=False)
    for step in range(3):
        model(torch.ones(2, 4)).mean().backward()
        if perturbs:
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad * (math.nan if step == bad_step else 1.0))
            optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        if perturbs:
            for parameter, old in zip(model.parameters(), kept, strict=True):
                parameter.data = old
        optimizer.step()
        optimizer.zero_grad()
    detach()


def test_the_weights_of_a_later_pass_are_kept_where_they_differ(tmp_path: Path) -> None:
    train(tmp_path / "run", perturbs=True, bad_step=1)
    found = series(tmp_path / "run")
    assert [math.isnan(value) for value in found["largest_weight_of_last_pass"]] == [False, True, False]
    assert found["largest_weight_of_last_pass"][0] == 2.0
    assert len(found["loss_of_first_pass"]) == 3
    assert all(map(math.isfinite, found["loss_of_first_pass"]))


def test_micro_batches_have_one_set_of_weights(tmp_path: Path) -> None:
    train(tmp_path / "run", perturbs=False)
    assert series(tmp_path / "run") == {name: [] for name in SERIES}


@pytest.mark.parametrize("perturbs", [True, False])
def test_the_loss_of_a_step_is_that_of_the_weights_before_its_update(perturbs: bool, tmp_path: Path) -> None:
    """L-BFGS and sharpness-aware minimization go through the model again with other weights."""
    model = nn.Linear(4, 1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if perturbs else torch.optim.LBFGS(model.parameters())
    losses: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) - 3.0).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        if perturbs:
            losses.append(closure().item())
            with torch.no_grad():
                model.weight.add_(0.1)
            closure()
            with torch.no_grad():
                model.weight.sub_(0.1)
            optimizer.step()
        else:
            losses.append(optimizer.step(closure).item())  # type: ignore[arg-type, attr-defined]
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT loss FROM steps ORDER BY step") == [(loss,) for loss in losses]


def test_tasks_that_adapt_copies_of_a_model_are_micro_batches(tmp_path: Path) -> None:
    """Meta-learning: a copy of the model per task, computed from its parameters, adapted with inner gradients."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    losses: list[float] = []
    for _ in range(3):
        total, copies = 0.0, []
        for _ in range(4):
            adapted = model.__new__(nn.Linear)
            adapted.__dict__ = model.__dict__ | {"_parameters": {k: v.clone() for k, v in model.named_parameters()}}
            copies.append(adapted)  # alive until the step ends, so that no two have the same id
            inner = adapted(torch.randn(2, 4)).square().mean()
            (gradient,) = torch.autograd.grad(inner, [adapted.weight], create_graph=True)
            adapted._parameters["weight"] = adapted.weight - 0.1 * gradient  # type: ignore[assignment]
            loss = adapted(torch.randn(2, 4)).square().mean()
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / 4)
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        found = [loss for (loss,) in store.rows("SELECT loss FROM steps ORDER BY step")]
    assert found == pytest.approx(losses)


@pytest.mark.parametrize("has_loader", [True, False])
@pytest.mark.parametrize("clears", ["none", "zeros", "after_forward", "never"])
def test_passes_that_an_epoch_leaves_over_count_only_if_their_gradients_are_used(
    clears: str, has_loader: bool, tmp_path: Path
) -> None:
    """YOLOv5 and MAE accumulate over a number of batches that need not divide those of an epoch. Without a `DataLoader`
    the end of the epoch is not seen."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    expected: list[float] = []
    passes: list[float] = []
    for epoch in range(3):
        if clears in ("none", "zeros"):
            optimizer.zero_grad(set_to_none=clears == "none")
            passes.clear()
        loader = DataLoader(TensorDataset(torch.randn(10, 4)), batch_size=2)
        for number, (batch,) in enumerate(loader if has_loader else ((torch.randn(2, 4),) for _ in range(5))):
            loss = model(batch).square().mean()
            if clears == "after_forward" and epoch and number == 0:
                optimizer.zero_grad()
                passes.clear()
            (loss / 2).backward()
            passes.append(loss.item())
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()
                optimizer.zero_grad()
                expected.append(sum(passes) / 2 if len(passes) == 2 else sum(passes) / 6)
                passes.clear()
    detach()  # the passes that are left at the end are no step
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert [loss for (loss,) in store.rows("SELECT loss FROM steps ORDER BY step")] == pytest.approx(expected)


@pytest.mark.parametrize("gradients", ["attack", "assigned", "copied"])
def test_passes_whose_gradients_are_cleared_count_only_if_the_loop_has_kept_them(
    gradients: str, tmp_path: Path
) -> None:
    """An attack needs the gradients of its inputs only; gradient surgery and private training combine kept ones."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    (model(torch.ones(2, 4)).sum() * 0.0).backward()
    optimizer.step()
    losses: list[list[float]] = []
    for _ in range(3):
        losses.append([])
        kept: list[torch.Tensor] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            assert model.weight.grad is not None
            kept.append(model.weight.grad.clone())
            losses[-1].append(loss.item())
        if gradients == "assigned":
            model.weight.grad = torch.stack(kept).mean(0)
        elif gradients == "copied":
            assert model.weight.grad is not None
            model.weight.grad.copy_(torch.stack(kept).mean(0))
        optimizer.step()
    detach()
    expected = [step[-1] if gradients == "attack" else sum(step) / 3 for step in losses]
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert [loss for (loss,) in store.rows("SELECT loss FROM steps ORDER BY step")] == pytest.approx(
            [0.0, *expected]
        )


def test_a_nan_among_losses_that_do_not_count_is_seen(tmp_path: Path) -> None:
    """A loop may clear gradients because they are NaN, without a norm that shows it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for number in range(5):
        (model(torch.ones(2, 4)).mean() * (math.nan if number == 2 else 1.0)).backward()
        if number != 2:
            optimizer.step()
        optimizer.zero_grad()
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT isnan(loss) FROM steps ORDER BY step") == [(False,), (False,), (True,), (False,)]
