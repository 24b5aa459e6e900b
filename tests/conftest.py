"""Fixtures and rules of every test: a clean environment, CUDA tests skipped without CUDA, tests/e2e marked."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from rankscope.import_names import claim_names
from tests.depth import NIGHTLY

claim_names()  # `rankscope.attach` and `probes.attach` are the same module in tests, as in Rankscope's processes

# Four ranks share two cores in these tests: one thread each, or they spend their time waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Variables of a launcher or of a user's shell that would change the result of a test.
_LEAKING_PREFIXES = ("RANKSCOPE_", "TORCHELASTIC_", "TORCH_FR_", "OTEL_", "SLURM_")
_LEAKING_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
_E2E_TIMEOUT_S = 300
_HANDLED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_TRIALS = Path(__file__).parent / "trials"

# `ci`: few examples, the same in each run. `nightly`: many, different ones each time. No deadline on busy machines.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=15, derandomize=True)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the trials out unless they are named."""
    if collection_path != _TRIALS:
        return None
    is_named = any(_TRIALS in (Path(arg).absolute(), *Path(arg).absolute().parents) for arg in config.args)
    return None if is_named else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _join_loggers_of_torch()
    if not NIGHTLY and not any("::" in argument for argument in config.args):
        deselected = [item for item in items if item.get_closest_marker("later")]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not item.get_closest_marker("later")]
    for item in items:
        if _folder(item) in ("e2e", "trials"):
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_E2E_TIMEOUT_S))

    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _join_loggers_of_torch() -> None:
    """Let torch's 80 loggers pass their records on to the one named `torch`, which prints them as they would.

    pytest adds two handlers to each logger that does not propagate, thrice a test: half of the time of a short one.
    """
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger) and not logger.propagate:
            logger.handlers.clear()
            logger.propagate = True


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def restored_signal_handlers() -> Iterator[None]:
    """Restore signal handlers after each test: a child that a later test starts would inherit an ignored signal."""
    before = {number: signal.getsignal(number) for number in _HANDLED}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a launcher's variables; a test that needs them sets them."""
    for name in list(os.environ):
        if name in _LEAKING_NAMES or name.startswith(_LEAKING_PREFIXES):
            monkeypatch.delenv(name)
