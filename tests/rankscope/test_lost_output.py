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
        command = [sys.executable, "-m", "rankscope", *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=100, check=False
        )
    assert done.stderr == "rankscope: standard output: No space left on device. Not everything was written.\n"
    assert done.returncode == 74
