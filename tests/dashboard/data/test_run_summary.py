"""The line of a run in the table of runs agrees with the diagnosis of the run."""

from __future__ import annotations

import pytest

from analyzers.run.live.state import RunState
from analyzers.verdict.run_facts import run_facts
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


@pytest.mark.parametrize(("word", "step_ms"), [("training", 200.0), ("finished", 100.0)])
def test_a_run_that_has_ended_has_the_numbers_of_its_report(word: str, step_ms: float) -> None:
    """Steps 1 to 70 took 100 ms and the newest 50 took 200 ms: the home page said 200 ms where the report says 100."""
    store = MemoryStore()
    start_ns = 0
    for step in range(1, 121):
        took_ns = (100 if step <= 70 else 200) * 1_000_000
        rows = [
            {"attempt": 0, "rank": rank, "step": step, "start_ns": start_ns + rank, "duration_ns": took_ns,
             "tokens": 50, "loss": float(step + rank), "committed": True}
            for rank in range(2)
        ]  # fmt: skip
        store.add("steps", rows)
        start_ns += took_ns
    found = run_summary(store, RunState(word=word, attempt=0, step=120))
    facts = run_facts(store, {})
    assert found["step_ms"] == step_ms
    if word == "finished":
        assert (found["step_ms"], round(found["tokens_per_s"], 1)) == (facts["step_ms_median"], facts["tokens_per_s"])
    assert found["loss"] == facts["last_loss"] == 120.0
