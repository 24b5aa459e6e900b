"""`rankscope demo` names both of its faults, with their ranks and steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.api import open_run
from tests.forked import run_python


@pytest.mark.trial(times=6)
def test_both_faults_are_named_with_their_ranks_and_steps(tmp_path: Path) -> None:
    command = ["-m", "rankscope", "demo", "--no-dashboard", "--runs-dir", str(tmp_path)]
    done = run_python(command, timeout_s=300, forks_python=True)
    assert done.returncode == 0, done.stderr
    slow, not_finite = (one for one in open_run(tmp_path / "latest").findings if one.status == "fired")
    assert (slow.kind, slow.cause, slow.ranks) == ("straggler", "compute", (3,))
    assert abs((slow.first_step or 0) - 60) <= 2, slow.summary
    assert slow.last_step == 150, slow.summary
    assert (not_finite.kind, not_finite.ranks, not_finite.first_step) == ("non_finite", (2,), 40)
