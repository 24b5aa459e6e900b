"""The line of a run in the table of runs agrees with the diagnosis of the run."""

from __future__ import annotations

import pytest

from analyzers.run.state import RunState
from dashboard.data.run_summary import run_summary
from tests.analyzers.memory_store import MemoryStore


@pytest.mark.parametrize(("newest", "severity"), [(0, "critical"), (1, "warning")])
def test_what_ended_an_attempt_is_a_warning_once_the_run_went_on(newest: int, severity: str) -> None:
    store = MemoryStore()
    store.event(
        "finding", wall_ns=5, id="rank_lost-0-r1", analyzer="rank_lost", finding_kind="rank_lost", severity="critical",
        status="fired", finding_ranks=[1], first_step=4, last_step=4, cause="signal", summary="one", evidence={},
        advice="rank-lost-signal", cost_s=None,
    )  # fmt: skip
    found = run_summary(store, RunState(word="finished", attempt=newest, step=9))
    assert (found["finding"], found["severity"]) == ("Rank lost", severity)
