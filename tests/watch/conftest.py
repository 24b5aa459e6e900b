"""Fixtures of the tests of `watch`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stand_ins import stand_ins


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Four that stand for ranks."""
    started = stand_ins(tmp_path, 4)
    yield started
    for process in started:
        process.kill()
        process.wait(100)
