"""First steps of unusual loops: optimizers that are yet to step, a program that pretends to have a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from probes.attach.attach import detach
from probes.attach.auto_attach import auto_attach
from probes.attach.loop.updates import TURNS
from probes.fail_open import error_counts
from probes.tape.rundir import RunDir
from store import Store

UPDATES = 10


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("is_called", [True, False])
def test_layers_that_are_trained_one_after_the_other_on_one_batch_have_a_loss_each_step(
    is_called: bool, num_passes: int, tmp_path: Path
) -> None:
    """As the forward-forward algorithm trains them, each layer with an optimizer of its own."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in layers]
    (batch,) = next(iter(DataLoader(TensorDataset(torch.ones(2, 4)), batch_size=2)))
    losses = []
    for layer, optimizer in zip(layers, optimizers, strict=True):
        for _ in range(UPDATES):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(num_passes):
                loss = (layer(batch) if is_called else layer.forward(batch)).square().mean()
                loss.backward()
                total += loss.item()
            losses.append(total / num_passes)
            optimizer.step()
        batch = layer(batch).detach()
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        recorded = store.rows("SELECT loss FROM steps ORDER BY step")
    assert [loss for (loss,) in recorded] == pytest.approx(losses)


REGULARISES, JOINS = 4, 10


def passes_of_regularised_gan(number: int) -> str:
    """As StyleGAN's loop: a second update at every fourth batch, the first included."""
    return "GGDD" if number % REGULARISES == 0 else "GD"


def passes_of_late_discriminator(number: int) -> str:
    """As in an autoencoder whose discriminator joins later."""
    return "G" if number < JOINS else "GD"


@pytest.mark.parametrize("passes", [passes_of_regularised_gan, passes_of_late_discriminator])
def test_updates_after_the_leaders_belong_to_the_step_of_their_batch(
    passes: Callable[[int], str], tmp_path: Path
) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False)
    models = {"G": nn.Linear(4, 4), "D": nn.Linear(4, 1)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(24, 4)))):
        for name in passes(number):
            optimizers[name].zero_grad()
            loss = models["D"](models["G"](batch)).sum() * 0.0 + number
            (loss * math.nan if name == "D" and number == 22 else loss).backward()
            optimizers[name].step()
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        counts = store.rows("SELECT count(*) FROM spans WHERE kind = 'backward' GROUP BY step ORDER BY step")
        losses = [loss for (loss,) in store.rows("SELECT loss FROM steps ORDER BY step")]
    since = JOINS + TURNS  # until then, nothing shows that the models take turns; the first batch may be two steps
    expected = [len(passes(number)) for number in range(since, 24)]
    assert [count for (count,) in counts][-len(expected) :] == expected
    assert losses[-len(expected) : -2] == list(range(since, 22))
    assert all(map(math.isnan, losses[-2:]))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has CUDA")
def test_a_program_that_pretends_to_have_a_gpu_is_timed_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wrappers do that run a program written for GPUs on a CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        timed = store.rows("SELECT count(*) FROM steps WHERE backward_ns > 0 AND optimizer_ns > 0")
    assert timed == [(UPDATES,)]
    assert not error_counts["phase_events"]
