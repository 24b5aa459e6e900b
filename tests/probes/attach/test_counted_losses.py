"""Losses that a loop multiplies by a count of tokens, to divide the gradients by the sum of the counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from probes.attach.attach import attach, detach
from probes.attach.loop.loss_scaling import LossScaling
from probes.attach.loop.step_losses import StepLosses
from probes.tape.rundir import RunDir
from store import Store


def train(run_dir: Path, steps: Sequence[Sequence[int]], *, number: type = torch.tensor) -> list[float]:
    """Train with micro-batches that have these numbers of tokens. Returns the mean loss of each step's tokens."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=run_dir, watch=False)
    means = []
    for counts in steps:
        total = 0.0
        for count in counts:
            tokens = number(count)
            loss = model(torch.randn(2, 4)).square().mean() * tokens
            total += loss.item()
            loss.backward()
            if number is torch.tensor:
                tokens.fill_(1)  # as an all-reduce in place
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= sum(counts)
        optimizer.step()
        optimizer.zero_grad()
        means.append(total / max(1, sum(counts)))
    detach()
    return means


def recorded(run_dir: Path) -> list[float]:
    with Store.open(RunDir(run_dir)) as store:
        return [loss for (loss,) in store.rows("SELECT loss FROM steps ORDER BY step")]


@pytest.mark.parametrize(
    "steps", [[(128, 37), (134, 256), (131, 1)], [(134,), (128,), (256,)], [(5, 5), (5, 0), (0, 0)]]
)
def test_the_loss_is_the_mean_of_all_tokens(steps: list[tuple[int, ...]], tmp_path: Path) -> None:
    means = train(tmp_path / "run", steps)
    assert recorded(tmp_path / "run") == pytest.approx(means)


def test_a_summed_cross_entropy_counts_its_targets(tmp_path: Path) -> None:
    """As fairseq sums it, over a varying number of tokens, to divide the gradients by their number."""
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    means: list[float] = []
    for lengths in ((3, 7), (9, 2), (4, 4)):
        total, count = 0.0, 0
        for length in lengths:
            targets = torch.randint(0, 5, (length,))
            targets[0] = 1  # padding
            loss = nn.functional.cross_entropy(model(torch.randn(length, 4)), targets, reduction="sum", ignore_index=1)
            loss.backward()
            total, count = total + loss.item(), count + int((targets != 1).sum())
        optimizer.step()
        optimizer.zero_grad()
        means.append(total / max(1, count))
    detach()
    assert recorded(tmp_path / "run") == pytest.approx(means)


@pytest.mark.parametrize("first", [134, 128])
def test_a_factor_that_is_a_number_keeps_its_meaning_in_all_steps(first: int, tmp_path: Path) -> None:
    """A count that the loop has read is a power of two in one step, and another number in the next."""
    steps = [(first,), (256,), (130,)]
    means = train(tmp_path / "run", steps, number=int)
    sums = [mean * counts[0] for mean, counts in zip(means, steps, strict=True)]
    assert recorded(tmp_path / "run") == pytest.approx(means if first == 128 else sums)


def test_a_count_on_a_device_is_not_waited_for() -> None:
    """The value of a tensor on the device "meta" cannot be read at all."""
    written: dict[str, Any] = {}

    class Values:
        def put(self, **values: Any) -> None:
            written.update(values)

    values: Any = Values()
    phases: Any = None
    losses = StepLosses(values, LossScaling(phases))
    weight, count = torch.ones((), device="meta", requires_grad=True), torch.tensor(3, device="meta")
    for product in (weight * 2.0 * count, count * (weight * 2.0)):
        losses.backward(product)
    losses.settle()
    assert written["loss"].is_meta
    assert written["loss"].dtype == torch.float32
