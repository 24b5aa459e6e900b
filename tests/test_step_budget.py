"""What attaching adds to a step on many GPUs: counted on a played device, over a fake group of up to 512 ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.played.step_budget import LAYOUTS, SINGLE

ROOT = Path(__file__).resolve().parents[1]
RANKS = 512
MAX_EVENTS = {SINGLE: 9, "ddp": 10, "fsdp": 35, "fsdp_tp": 49, "1f1b": 37}
"""Eight boundaries of phases and gaps, one for values that are read back, two for each wait of the stream. DDP has one
wait, which ends with the backward pass; FSDP of four blocks and their root has 13, with TP 20; 1F1B has two boundaries
per pass."""
VALUES = {"ddp": 3, "fsdp": 2, "fsdp_tp": 2, "1f1b": 1, SINGLE: 2}
"""What is read back: the loss, the norm where clipping computes the whole one, and the norm of the gradient that
reaches the first layer. Stage 0 of 1F1B has no loss and no whole norm."""
KERNELS = {"ddp": 1, "fsdp": 1, "fsdp_tp": 1, "1f1b": 10, SINGLE: 0}
"""The norm of the gradient that reaches the first layer; of eight microbatches the largest of eight norms."""


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if not shutil.which("c++"):
        pytest.skip("the played device needs a C++ compiler")
    file = tmp_path_factory.mktemp("budget") / "budget.json"
    words = [sys.executable, "-m", "tests.support.played.step_budget", "--ranks", str(RANKS), "--json", str(file)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["layout"]: row for row in json.loads(file.read_text())}


@pytest.mark.timeout(660)
@pytest.mark.parametrize("layout", [SINGLE, *LAYOUTS])
def test_a_step_stays_within_its_budget(added: dict[str, dict[str, Any]], layout: str) -> None:
    """Once, copying the loss took two kernels for its type, one to stack, and a wait for a second event."""
    row = added[layout]
    assert row["kernels"] == KERNELS[layout], row["operators"]
    assert row["copies"] == VALUES[layout]
    assert row["syncs"] == 0
    assert row["collectives"] == 0
    assert (row["copies"] > 0) <= row["events"] <= MAX_EVENTS[layout]
    assert row["events"] > 2 or layout != SINGLE  # phases of one rank are timed by events
