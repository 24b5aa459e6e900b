"""One small real run for the tests of the pages, and what each of them needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launched import LaunchedRun
from tests.support.recorded_runs import recorded


@pytest.fixture(scope="session")
def finished_run() -> LaunchedRun:
    """Two ranks, 24 steps, a NaN on rank 1 at step 12."""
    return recorded(
        "two", faults=["nan_grad@step=12,rank=1"], settings=["train.steps=24", "probes.gradient_interval=5"]
    )


@pytest.fixture
def runs(finished_run: LaunchedRun) -> Path:
    """Its folder of runs."""
    return finished_run.runs_dir


@pytest.fixture(autouse=True)
def _unhurt_by_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that reads a run or a folder waits for nobody: at its own priority it starves beside other tests."""
    monkeypatch.setattr("dashboard.data.child_answer.NICENESS", 0)


@pytest.fixture(autouse=True)
def _no_run_of_another_test() -> Iterator[None]:
    yield
    os.environ.pop("RANKSCOPE_DASHBOARD_RUNS", None)
