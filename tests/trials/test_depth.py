"""Tests that try a little in `make test`, with all that they can try."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite import ROOT

pytestmark = [pytest.mark.trial(times=1), pytest.mark.timeout(3600)]

TESTS = ROOT / "tests"
DEEP = sorted(
    str(path.relative_to(TESTS))
    for path in TESTS.rglob("test_*.py")
    if path != Path(__file__) and "from tests.depth import" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", DEEP)
def test_nightly_cases_pass(path: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"tests/{path}"],
        cwd=ROOT, env=os.environ | {"HYPOTHESIS_PROFILE": "nightly"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
