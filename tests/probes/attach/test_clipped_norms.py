"""The gradient norm of loops that clip in parts, several times or by a reduced norm, or call `model.forward`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from probes.attach.attach import attach, detach
from probes.attach.auto_attach import auto_attach
from probes.tape.rundir import RunDir
from store import Store

STEPS = 3
Parameters = list[nn.Parameter]


def _by_a_reduced_norm(parameters: Parameters) -> None:
    """As over the stages of a pipeline, each with a part of the model."""
    total = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]) * 2
    nn.utils.clip_grads_with_norm_(parameters, max_norm=1.0, total_norm=total, foreach=False)


def _by_one_norm_in_parts(parameters: Parameters) -> None:
    """As torchtitan clips experts and other weights, which have different meshes."""
    total = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]) * 2
    for one in parameters:
        nn.utils.clip_grads_with_norm_([one], 1.0, total)


def _in_parts(parameters: Parameters) -> None:
    for one in parameters:
        nn.utils.clip_grad_norm_(one, 1e-3)


def _twice(parameters: Parameters) -> None:
    for max_norm in (1.0, 1e-3):
        nn.utils.clip_grad_norm_(parameters, max_norm)


def _in_parts_by_the_largest(parameters: Parameters) -> None:
    for one in parameters:
        nn.utils.clip_grad_norm_(one, 1e-3, norm_type=float("inf"))


def test_the_largest_gradient_of_parts_is_the_largest_of_their_largest(tmp_path: Path) -> None:
    found, truth = _norms(tmp_path / "run", _in_parts_by_the_largest, order=float("inf"))
    assert found == pytest.approx(truth)


CLIPS: dict[Callable[[Parameters], None], float] = {
    _by_a_reduced_norm: 2.0,
    _by_one_norm_in_parts: 2.0,
    _in_parts: 1.0,
    _twice: 1.0,
}
"""By ways of clipping: the norm that is meant, in norms of the gradient that the passes have left."""


def _norms(
    run_dir: Path, clip: Callable[[Parameters], None], *, passes: int = 1, order: float = 2.0
) -> tuple[list[float], list[float]]:
    """Norms that are recorded, and norms of the gradients before the last pass's clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attach(model, optimizer, run_dir=run_dir, watch=False)
    truth = []
    for _ in range(STEPS):
        for _ in range(passes):
            (model(torch.randn(2, 4)).sum() * 10).backward()
            gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
            norm = float(torch.cat(gradients).norm(order))
            clip(list(model.parameters()))
        truth.append(norm)
        optimizer.step()
        optimizer.zero_grad()
    detach()
    with Store.open(RunDir(run_dir)) as store:
        return [norm for (norm,) in store.rows("SELECT grad_norm FROM steps ORDER BY step")], truth


@pytest.mark.parametrize("clip", CLIPS)
def test_the_norm_is_that_by_which_the_loop_clips(clip: Callable[[Parameters], None], tmp_path: Path) -> None:
    found, truth = _norms(tmp_path / "run", clip)
    assert found == pytest.approx([norm * CLIPS[clip] for norm in truth])


def test_a_loop_that_clips_after_each_pass_has_the_norm_after_the_last(tmp_path: Path) -> None:
    found, truth = _norms(tmp_path / "run", _in_parts, passes=3)
    assert found == pytest.approx(truth)


def test_a_model_of_which_only_forward_is_called_has_a_norm(tmp_path: Path) -> None:
    """No hook of the model runs: its parameters are known by the optimizer."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(STEPS):
        model.forward(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        norm = float(nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))
        optimizer.zero_grad()
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT grad_norm FROM steps") == [(pytest.approx(norm),)] * STEPS
        assert store.rows("SELECT count(*) FROM events WHERE kind = 'first_update'") == [(1,)]


@pytest.mark.parametrize("fetches", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_the_loop_skips_for_its_norm_is_refused(to_none: bool, fetches: bool, tmp_path: Path) -> None:
    """As ESPnet's loop skips it, with two passes a step: the update that follows belongs to the next step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    data = torch.ones(12, 4)
    data[5] = math.nan
    batches = DataLoader(TensorDataset(data), batch_size=1) if fetches else ((one,) for one in data)
    for number, (batch,) in enumerate(batches):
        model(batch).mean().backward()
        if number % 2:
            if nn.utils.clip_grad_norm_(model.parameters(), 10.0).isfinite():
                optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        rows = store.rows("SELECT committed, isnan(loss), isnan(grad_norm), data_ns > 0 FROM steps ORDER BY step")
    assert rows == [(number != 2, number == 2, number == 2, fetches) for number in range(6)]
