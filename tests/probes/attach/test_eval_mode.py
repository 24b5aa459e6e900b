"""Loops that train a model in eval mode: its calls are forward passes, not evaluations."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from probes.attach.attach import attach, detach
from probes.attach.auto_attach import auto_attach
from probes.tape.rundir import RunDir
from store import Store

NUM_BATCHES = 6
DATA = TensorDataset(torch.ones(2 * NUM_BATCHES, 4))


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for (x,) in DataLoader(DATA, batch_size=2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def steps(run_dir: Path) -> list[tuple[int, bool, bool, bool]]:
    with Store.open(RunDir(run_dir)) as store:
        return store.rows("SELECT step, data_ns > 0, forward_ns > 0, evaluate_ns > 0 FROM steps ORDER BY step")


def test_a_model_that_was_never_in_training_mode_has_forward_passes(tmp_path: Path) -> None:
    """As `from_pretrained` returns models. The first call is over before the model is known."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model = nn.Linear(4, 1).eval()
    epoch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    detach()
    assert steps(tmp_path / "run") == [(step, True, step > 1, False) for step in range(1, NUM_BATCHES + 1)]


def test_an_evaluation_that_never_goes_back_to_training_mode_is_seen_at_the_next_backward_pass(tmp_path: Path) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epoch(model, optimizer)
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
    epoch(model, optimizer)
    detach()
    first = NUM_BATCHES + 1  # the first in eval mode: known once it has a backward pass
    expected = [(n, True, n != first, n in (NUM_BATCHES, first)) for n in range(1, 2 * NUM_BATCHES + 1)]
    assert steps(tmp_path / "run") == expected


def test_an_evaluation_with_gradients_in_eval_mode_is_not_a_training_pass(tmp_path: Path) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        epoch(model.train(), optimizer)
        model.eval()(torch.ones(2, 4))
    detach()
    expected = [(n, True, True, n % NUM_BATCHES == 0) for n in range(1, 2 * NUM_BATCHES + 1)]
    assert steps(tmp_path / "run") == expected


def test_a_wrapper_left_in_eval_mode_has_forward_passes(tmp_path: Path) -> None:
    """As Lightning leaves `DistributedDataParallel`: it checks one validation batch, then sets the inner modes only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model = nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
        for _ in range(2):
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
            inner.train()
            epoch(model, optimizer)
        detach()
    finally:
        dist.destroy_process_group()
    expected = [(n, True, True, n == NUM_BATCHES) for n in range(1, 2 * NUM_BATCHES + 1)]
    assert steps(tmp_path / "run") == expected
