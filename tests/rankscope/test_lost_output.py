"""A full disk behind standard output is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["version"], ["analyze", "--help"]])
def test_it_is_one_line_whenever_it_shows(arguments: list[str], unbuffered: str) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rankscope", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, timeout=100,
        )  # fmt: skip
    assert done.stderr == "rankscope: standard output: No space left on device. Not everything was written.\n"
    assert done.returncode == 74
