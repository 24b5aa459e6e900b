"""Faults that a drill injects into a loop of the user's own: each delay lies in the place that it is meant for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from probes.attach.attach import attach, detach
from probes.attach.injected_fault import InjectedFault
from probes.attach.injection import inject
from probes.tape.rundir import RunDir
from store import Store

DELAY_S = 0.03
LONG_S = 0.3
"""Longer than a phase that is not slow, on a busy machine too."""
STEPS = 4


@pytest.fixture
def undo(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RANKSCOPE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    made: list[Callable[[], None]] = []
    yield made
    for one in made:
        one()
    detach()


def train(
    folder: Path,
    fault: InjectedFault | tuple[InjectedFault, ...],
    undo: list[Callable[[], None]],
    *,
    in_training_mode: bool = True,
) -> Store:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).train(in_training_mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=folder / "run", watch=False)
    faults = fault if isinstance(fault, tuple) else (fault,)
    undo.append(inject(";".join(one.text for one in faults)))
    loader = DataLoader(TensorDataset(torch.randn(4 * STEPS, 4), torch.randn(4 * STEPS, 1)), batch_size=4)
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), folder / "state.pt")
    detach()
    return Store.open(RunDir(folder / "run"))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("slow_data", "data"),
        ("slow_batch", "before_forward"),
        ("slow_forward", "forward"),
        ("busy_forward", "forward"),
        ("slow_after_forward", "forward_to_backward"),
        ("slow_backward", "backward"),
        ("slow_before_optimizer", "backward_to_optimizer"),
        ("garbage", "backward_to_optimizer"),
        ("slow_optimizer", "optimizer"),
        ("slow_after_optimizer", "after_optimizer"),
    ],
)
def test_a_delay_is_in_its_place(tmp_path: Path, undo: list[Callable[[], None]], name: str, place: str) -> None:
    fault = InjectedFault(name=name, step=2, rank=0, seconds=DELAY_S, lasts=True)
    with train(tmp_path, fault, undo) as store:
        ((seconds,),) = store.rows(f"SELECT {place}_ns / 1e9 FROM steps WHERE step = 3")
        assert seconds >= 0.9 * DELAY_S
        assert store.rows("SELECT step FROM events WHERE kind = 'fault_injected'") in ([(2,)], [(1,)])


def test_several_faults_take_turns(tmp_path: Path, undo: list[Callable[[], None]]) -> None:
    first = InjectedFault(name="slow_forward", step=2, rank=0, seconds=LONG_S, lasts=True, until=2)
    second = InjectedFault(name="slow_optimizer", step=3, rank=0, seconds=LONG_S, lasts=True)
    with train(tmp_path, (first, second), undo) as store:
        slow = f"SELECT step, forward_ns >= {LONG_S} * 9e8, optimizer_ns >= {LONG_S} * 9e8 FROM steps WHERE step > 1"
        assert store.rows(slow + " ORDER BY step") == [(2, True, False), (3, False, True), (4, False, True)]


def test_a_save_is_delayed_inside_the_phase_checkpoint(tmp_path: Path, undo: list[Callable[[], None]]) -> None:
    with train(tmp_path, InjectedFault(name="slow_disk", step=2, rank=0, lasts=True), undo) as store:
        assert store.rows("SELECT checkpoint_ns >= 1e9 FROM steps WHERE step = 4") == [(True,)]


def test_another_ranks_fault_changes_nothing(tmp_path: Path, undo: list[Callable[[], None]]) -> None:
    with train(tmp_path, InjectedFault(name="exception", step=2, rank=1), undo) as store:
        assert store.rows("SELECT count(*) FROM events WHERE kind = 'fault_injected'") == [(0,)]


@pytest.mark.parametrize("in_training_mode", [True, False])
def test_a_bad_batch_is_not_finite(tmp_path: Path, undo: list[Callable[[], None]], in_training_mode: bool) -> None:
    fault = InjectedFault(name="nan_batch", step=2, rank=0)
    with train(tmp_path, fault, undo, in_training_mode=in_training_mode) as store:
        assert store.rows("SELECT step, isnan(loss) FROM steps ORDER BY step LIMIT 2") == [(1, False), (2, True)]


def test_a_fault_is_read_as_it_was_written() -> None:
    fault = InjectedFault(name="kill", step=30, rank=1, seconds=0.02, lasts=True)
    assert InjectedFault.parse(fault.text) == fault
    with pytest.raises(ValueError, match="step"):
        InjectedFault.parse("kill@rank=1")
