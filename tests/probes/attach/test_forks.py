"""Processes that a rank forks, as an evaluator: they leave no trace in its records."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from probes.attach.attach import attach, current, detach, log, phase
from probes.tape.rundir import RunDir
from store import Store


def rows(run_dir: Path, sql: str) -> list[tuple[object, ...]]:
    with Store.open(RunDir(run_dir)) as store:
        return store.rows(sql)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        log(accuracy=0.5)
        with phase("my own"):
            pass


def by_fork(evaluate: Callable[[], None]) -> None:
    """The child ends as an interpreter does: its exit is noted, then `atexit` runs."""
    attached = current()
    assert attached is not None
    if (pid := os.fork()) == 0:
        try:
            with attached.end.exits_of_script():
                evaluate()
                sys.exit(3)
        finally:
            attached._at_exit()
            os._exit(0)
    os.waitpid(pid, 0)


def by_multiprocessing(evaluate: Callable[[], None]) -> None:
    process = multiprocessing.get_context("fork").Process(target=evaluate)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("start", [by_fork, by_multiprocessing])
def test_a_forked_process_leaves_the_records_of_its_parent_alone(
    start: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    train(model, optimizer, 2)
    start(lambda: train(model, optimizer, 5))
    train(model, optimizer, 2)
    detach()
    assert rows(tmp_path / "run", "SELECT step FROM steps ORDER BY step") == [(1,), (2,), (3,), (4,)]
    assert rows(tmp_path / "run", "SELECT step FROM scalars ORDER BY step") == [(1,), (2,), (3,), (4,)]
    assert rows(tmp_path / "run", "SELECT count(*) FROM spans WHERE kind = 'forward'") == [(4,)]
    ends = "SELECT kind FROM events WHERE kind IN ('exception', 'run_ended', 'rank_closed') ORDER BY kind"
    assert rows(tmp_path / "run", ends) == [("rank_closed",), ("run_ended",)]


@pytest.mark.parametrize("start", [by_fork, by_multiprocessing])
def test_the_collectives_of_a_forked_process_are_not_recorded(
    start: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    """Groups that it makes itself are those of another job."""

    def reduce() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(total := torch.ones(1))
        assert total.item() == 1.0
        dist.destroy_process_group()

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    train(model, optimizer, 1)
    start(reduce)
    train(model, optimizer, 1)
    detach()
    assert rows(tmp_path / "run", "SELECT count(*) FROM collectives") == [(0,)]
    assert rows(tmp_path / "run", "SELECT kind FROM events WHERE kind = 'process_group'") == []
    assert rows(tmp_path / "run", "SELECT step FROM steps ORDER BY step") == [(1,), (2,)]
