"""One small real run for the tests of the pages, and what each of them needs."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e.launched import LaunchedRun, train

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "build" / "recorded-runs"
_SOURCES = ("probes", "store", "analyzers", "watch", "trainer", "rankscope", "tests/e2e", "tests/support")
_KEPT_S = 24 * 3600.0


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
    monkeypatch.setattr("dashboard.data.processes.child_answer.NICENESS", 0)


@pytest.fixture(autouse=True)
def _no_run_of_another_test() -> Iterator[None]:
    yield
    os.environ.pop("RANKSCOPE_DASHBOARD_RUNS", None)


def recorded(layout: str, *, faults: Sequence[str] = (), settings: Sequence[str] = ()) -> LaunchedRun:
    """`rankscope train` with these arguments, run to its clean end by whoever asks first."""
    arguments = json.dumps([layout, list(faults), list(settings)])
    key = hashlib.sha256(f"{_code()}{arguments}".encode()).hexdigest()[:16]
    _FOLDER.mkdir(parents=True, exist_ok=True)
    folder = _FOLDER / key
    printed = folder / "printed.txt"
    with (_FOLDER / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            _forget_old()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            made = train(folder, layout, faults=faults, settings=settings)
            made.analyze()  # writes the findings of the post-mortem into its store
            printed.write_text(made.output)
    ended = SimpleNamespace(returncode=0, poll=lambda: 0)
    return LaunchedRun(ended, folder / "runs", printed.read_text())  # type: ignore[arg-type]


@functools.cache
def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for source in _SOURCES for path in (_ROOT / source).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _forget_old() -> None:
    for path in _FOLDER.iterdir():
        if path.is_dir() and time.time() - path.stat().st_mtime > _KEPT_S:
            shutil.rmtree(path, ignore_errors=True)
