"""No process of a run outlives its test, however the test ends; and where its time went adds up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.tape.rundir import RunDir
from tests.e2e.account import check_account
from tests.e2e.launched import STARTED


@pytest.fixture(autouse=True)
def nothing_is_left_running(tmp_path: Path) -> Iterator[None]:
    """It asks for `tmp_path` so that the run is still there when its account is checked."""
    yield
    paths = {run.runs_dir / "latest" for run in STARTED if (run.runs_dir / "latest").exists()}
    while STARTED:
        run = STARTED.pop()
        if run.process.poll() is None:
            run.kill_all()
        if run.process.stdout is not None:
            run.process.stdout.close()
    for path in paths:
        check_account(RunDir.open(path))
