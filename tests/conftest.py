"""Fixtures and rules of every test: a clean environment, CUDA tests skipped without CUDA, tests/e2e marked."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import hypothesis
import pytest

from rankscope.own_names import claim_names

claim_names()  # `rankscope.attach` and `probes.attach` are one module in a test as in a process of ours

# Four ranks share two cores in these tests: one thread each, or they spend their time waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A variable of a launcher, or of a user's shell, that would change what a test sees.
_LEAKING_PREFIXES = ("RANKSCOPE_", "TORCHELASTIC_", "TORCH_FR_", "OTEL_", "SLURM_")
_LEAKING_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
_E2E_TIMEOUT_S = 300
_LONG_FIRST = (
    "e2e/test_slurm.py", "e2e/test_nodes.py", "e2e/test_faults.py", "e2e/test_script_drill.py", "e2e/test_soak.py",
    "e2e/test_alerting.py", "e2e", "trainer", "dashboard", "hostile",
)  # fmt: skip
_MAX_WORKERS = 8

hypothesis.settings.register_profile("rankscope", deadline=None)
hypothesis.settings.load_profile("rankscope")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Several workers take a file at a time: the long ones first, or one worker ends with them alone; and those of
    # tests/e2e, which wait much, in turn with others, which compute.
    items.sort(key=_place)
    files = list(dict.fromkeys(item.path for item in items))
    waiting = [path for path in files if path.parent.name == "e2e"]
    others = [path for path in files if path.parent.name != "e2e"]
    turns = {path: turn for turn, path in enumerate(itertools.chain(*itertools.zip_longest(waiting, others)))}
    items.sort(key=lambda item: turns[item.path])
    for item in items:
        if _folder(item) == "e2e":
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_E2E_TIMEOUT_S))

    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_xdist_auto_num_workers() -> int:
    """One a core: with more, the ranks of tests wait for cores, which is what some tests say must not be found."""
    return min(_MAX_WORKERS, max(2, len(os.sched_getaffinity(0))))


def _place(item: pytest.Item) -> int:
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    return next((place for place, start in enumerate(_LONG_FIRST) if path.startswith(start)), len(_LONG_FIRST))


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test inherits a launcher's variables; one that needs them sets them."""
    for name in list(os.environ):
        if name in _LEAKING_NAMES or name.startswith(_LEAKING_PREFIXES):
            monkeypatch.delenv(name)
