"""The loss of a step with several losses, models or micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from probes.attach.attach import attach, detach
from probes.attach.auto_attach import auto_attach
from probes.attach.loop.step_losses import FIRST_LOSS
from probes.attach.loop.updates import TURNS
from probes.tape.rundir import RunDir
from store import Store

Losses = list[float]


def rows(run_dir: Path, sql: str) -> list[tuple[object, ...]]:
    with Store.open(RunDir(run_dir)) as store:
        return store.rows(sql)


class Tasks:
    """A backbone and two heads, called one by one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.backbone, *self.heads = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        parts = nn.ModuleList([self.backbone, *self.heads])
        self.optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)

    def losses(self) -> list[Callable[[], Tensor]]:
        x = self.backbone(torch.randn(2, 4))
        return [lambda head=head: head(x).square().mean() for head in self.heads]


def heads_first(tasks: Tasks) -> float:
    """Both heads, then a backward pass for each."""
    losses = [loss() for loss in tasks.losses()]
    for loss in losses:
        loss.backward(retain_graph=True)
    return sum(loss.item() for loss in losses)


def heads_in_turn(tasks: Tasks) -> float:
    """A backward pass before the next head is called."""
    found = []
    for make in tasks.losses():
        loss = make()
        loss.backward(retain_graph=True)
        found.append(loss.item())
    return sum(found)


def two_views(tasks: Tasks) -> float:
    """One model called twice before two losses of both outputs."""
    first, second = (tasks.backbone(torch.randn(2, 4)) for _ in range(2))
    losses = [(first - second).square().mean(), (first + second).square().mean()]
    for loss in losses:
        loss.backward(retain_graph=True)
    return sum(loss.item() for loss in losses)


def weighted(tasks: Tasks) -> float:
    """Four micro-batches whose losses the loop weights, but does not divide by four."""
    found = []
    for _ in range(4):
        loss = 0.5 * tasks.backbone(torch.randn(2, 4)).square().mean()
        loss.backward()
        found.append(loss.item())
    return sum(found) / 4


def by_tokens(tasks: Tasks) -> float:
    """Two micro-batches weighted by their share of the batch's tokens."""
    found = []
    for share in (0.75, 0.25):
        loss = tasks.backbone(torch.randn(2, 4)).square().mean() * share
        loss.backward()
        found.append(loss.item())
    return sum(found)


def two_losses_of_micro_batches(tasks: Tasks) -> float:
    """Two micro-batches of two losses each."""
    found = []
    for _ in range(2):
        out = tasks.backbone(torch.randn(2, 4))
        for loss in (out.square().mean(), 0.1 * out.abs().mean()):
            loss.backward(retain_graph=True)
            found.append(loss.item())
    return sum(found) / 2


def micro_batches_without_hooks(tasks: Tasks) -> float:
    """Four micro-batches through `forward`, as stages of a pipeline are called: no hook sees the model."""
    found = []
    for _ in range(4):
        loss = tasks.backbone.forward(torch.randn(2, 4)).square().mean()
        loss.backward()
        found.append(loss.item())
    return sum(found) / 4


def two_losses_without_hooks(tasks: Tasks) -> float:
    """Two micro-batches of two losses each, through `forward`."""
    found = []
    for _ in range(2):
        out = tasks.backbone.forward(torch.randn(2, 4))
        for loss, keeps in ((out.square().mean(), True), (out.abs().mean(), False)):
            loss.backward(retain_graph=keeps)
            found.append(loss.item())
    return sum(found) / 2


@pytest.mark.parametrize(
    "step",
    [
        heads_first, heads_in_turn, two_views, weighted, by_tokens, two_losses_of_micro_batches,
        micro_batches_without_hooks, two_losses_without_hooks,
    ],
)  # fmt: skip
def test_losses_of_one_pass_add_up_and_those_of_micro_batches_are_averaged(
    step: Callable[[Tasks], float], tmp_path: Path
) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False)
    tasks = Tasks()
    expected: Losses = []
    for _ in range(3):
        tasks.optimizer.zero_grad()
        expected.append(step(tasks))
        tasks.optimizer.step()
    detach()
    assert rows(tmp_path / "run", "SELECT loss FROM steps ORDER BY step") == [(pytest.approx(one),) for one in expected]


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids))
        return out


def test_a_pass_that_checkpointing_computes_again_counts_once(tmp_path: Path) -> None:
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    losses: Losses = []
    for _ in range(2):
        out = checkpoint(model, torch.tensor([[1, 2, 3], [4, 0, 1]]), use_reentrant=False)
        for loss in (out.square().mean(), out.abs().mean()):
            loss.backward(retain_graph=True)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    detach()
    expected = [(6, pytest.approx(sum(losses[i : i + 2]))) for i in (0, 2)]
    assert rows(tmp_path / "run", "SELECT tokens, loss FROM steps ORDER BY step") == expected
    assert rows(tmp_path / "run", "SELECT count(*) FROM spans WHERE kind = 'forward'") == [(2,)]


@pytest.mark.parametrize(
    "scales", [(2.0**10, 2.0**11, 2.0**5), (2.0**20, 2.0**20.001, 2.0**20.002), (100.0, 100.0, 100.0)]
)
def test_a_loss_scale_applied_by_the_loop_is_not_part_of_the_loss(scales: tuple[float, ...], tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    expected: Losses = []
    for scale in scales:
        loss = model(torch.ones(2, 4)).square().mean()
        (loss * scale).backward()
        expected.append(loss.item() * (scale if scale == 100.0 else 1.0))  # that one is a weight
        optimizer.step()
    detach()
    assert rows(tmp_path / "run", "SELECT loss FROM steps ORDER BY step") == [(pytest.approx(one),) for one in expected]


def test_a_tensor_that_the_programs_hooks_keep_is_not_read(tmp_path: Path) -> None:
    """Offloaded activations are dropped when they are fetched back, so a second read fails."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    kept: dict[int, Tensor] = {}

    def offload(tensor: Tensor) -> int:
        kept[len(kept) + 1] = tensor
        return len(kept)

    expected: Losses = []
    for _ in range(2):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(offload, kept.pop):
            loss = model(torch.ones(2, 4)).square().sum() / torch.tensor(2.0)
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
    detach()
    assert rows(tmp_path / "run", "SELECT loss FROM steps ORDER BY step") == [(pytest.approx(one),) for one in expected]


@pytest.mark.parametrize("passes_first", [False, True])
def test_the_loss_of_another_optimizer_is_not_part_of_the_step(passes_first: bool, tmp_path: Path) -> None:
    """A discriminator and its generator, or an architecture and its weights on two loaders. If both passes come before
    the updates, they cannot be told apart, and are summed."""
    first, leader = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, leader)]
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(10, 4)), batch_size=2)):
        for model, offset, optimizer in zip((first, leader), (100.0, 0.0), optimizers, strict=True):
            (model(batch).sum() * 0.0 + offset + number).backward()
            if not passes_first:
                optimizer.step()
        if passes_first:
            for optimizer in optimizers:
                optimizer.step()
    detach()
    losses = rows(tmp_path / "run", "SELECT loss FROM steps ORDER BY step")
    assert losses == [(100.0 + 2 * number if passes_first else float(number),) for number in range(5)]


def test_a_nan_in_the_loss_of_another_optimizer_counts_for_the_step(tmp_path: Path) -> None:
    first, leader = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, leader)]
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(10, 4)), batch_size=2)):
        offsets = (math.nan if number == 3 else 9.0, 0.0)
        for model, offset, optimizer in zip((first, leader), offsets, optimizers, strict=True):
            (model(batch).sum() + offset).backward()  # the gradient stays finite
            optimizer.step()
    detach()
    losses = rows(tmp_path / "run", "SELECT step FROM steps WHERE isnan(loss)")
    assert losses == [(4,)]


@pytest.mark.parametrize("order", ["DG", "GD"])
def test_the_loss_before_the_first_of_several_updates_is_kept(order: str, tmp_path: Path) -> None:
    """Whether the leader, which is the last to step on the first batch, updates first or last on a later one."""
    models = {name: nn.Linear(4, 1) for name in "DG"}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(20, 4)), batch_size=2)):
        for place, name in enumerate("DG" if number < 2 * TURNS else order):
            (models[name](batch).sum() * 0.0 + number + 100.0 * place).backward()
            optimizers[name].step()
    detach()
    first = rows(tmp_path / "run", f"SELECT value FROM scalars WHERE name = '{FIRST_LOSS}' ORDER BY step DESC LIMIT 3")
    assert first == [(float(number),) for number in (9, 8, 7)]


@pytest.mark.parametrize("calls", ["forward_first", "in_turn", "together"])
def test_losses_that_are_given_as_a_list_are_those_of_a_pipelines_last_stage(calls: str, tmp_path: Path) -> None:
    """`torch.distributed.pipelining` runs a backward pass for each micro-batch; a stage before it has no loss."""
    stage = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    attach(stage, optimizer, run_dir=tmp_path / "run", watch=False)
    expected: list[float] = []
    for _ in range(3):
        received = [torch.randn(1, 4) for _ in range(4)]
        losses: list[Tensor] = []
        for one in received:
            losses.append(stage(one).square().mean())
            if calls == "in_turn":
                torch.autograd.backward([losses[-1]], grad_tensors=[None])
        for loss in losses if calls == "forward_first" else []:
            torch.autograd.backward([loss], grad_tensors=[None])
        if calls == "together":
            torch.autograd.backward(losses)
        output = nn.Linear(4, 1)(torch.ones(1, 4))
        torch.autograd.backward([output], grad_tensors=[torch.ones(1, 1)])
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(loss.item() for loss in losses) / (1 if calls == "together" else 4))
    detach()
    assert [loss for (loss,) in rows(tmp_path / "run", "SELECT loss FROM steps ORDER BY step")] == pytest.approx(
        expected
    )
