"""The line of a run in the table of runs agrees with the diagnosis of the run."""

from __future__ import annotations

from typing import Any

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.run.live.state import RunState
from analyzers.verdict.run_facts import run_facts
from dashboard.data.run_summary import run_summary, worst_of
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
    """Steps 1 to 70 took 100 ms and the newest 50 took 200 ms: the home page said 200 ms where the report says 100. The
    loss of step 121, which did not end, is not the run's last one.
    """
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
    store.add("steps", [row | {"step": 121, "start_ns": start_ns, "duration_ns": None, "loss": 7.0} for row in rows])
    found = run_summary(store, RunState(word=word, attempt=0, step=120))
    facts = run_facts(store, {})
    assert found["step_ms"] == step_ms
    if word == "finished":
        assert (found["step_ms"], round(found["tokens_per_s"], 1)) == (facts["step_ms_median"], facts["tokens_per_s"])
    assert found["loss"] == facts["last_loss"] == 120.0


@pytest.mark.parametrize(
    ("facts", "finding"),
    [
        ({"steps": 50, "ended": "finished"}, "none"),
        ({"steps": 50, "ended": "failed"}, "unknown"),
        ({"steps": None, "ended": "launcher_lost", "no_rank_started": True}, "not judged"),
    ],
)
def test_only_a_run_with_judged_steps_has_no_finding(facts: dict[str, Any], finding: str) -> None:
    assert worst_of(Diagnosis(run=facts, verdict="", findings=()))["finding"] == finding
