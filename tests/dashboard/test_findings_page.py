"""The page of findings on runs that tests write: closed ones, links that are of another run, hostile evidence."""

from __future__ import annotations

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from analyzers.finding import Finding
from analyzers.run.live.state import RunState
from dashboard.views.findings import as_of
from probes.tape.rundir import RunDir
from tests.analyzers.report.hostile import hostile_run
from tests.dashboard.opened import open_page, shown
from tests.factories import RankWriter, make_run
from tests.waiting import wait_for


def two_runs_with_a_dead_rank(tmp_path: Path) -> tuple[RunDir, RunDir]:
    """The same rank is killed in both, in other steps."""
    first = make_run(tmp_path, ranks=2, steps=20, kill={1: 12})
    first.path.rename(first.path.with_name("first"))
    second = make_run(tmp_path, ranks=2, steps=20, kill={1: 16})
    second.path.rename(second.path.with_name("second"))
    return RunDir(first.path.with_name("first")), RunDir(second.path.with_name("second"))


def test_a_finding_in_the_address_is_dropped_with_the_run_it_is_of(tmp_path: Path) -> None:
    first, _ = two_runs_with_a_dead_rank(tmp_path)
    app = open_page(first.path.parent, "findings", run="first", finding="rank_lost-0-r1")
    wait_for(lambda: "All findings" in [b.label for b in app.button] or app.run() is None, "the finding", deadline_s=60)
    app.selectbox(key="run_choice").set_value("second").run()
    assert not app.exception
    assert "finding" not in app.query_params
    assert "All findings" not in [button.label for button in app.button]


@pytest.mark.parametrize(
    ("word", "kind", "last_step", "text"),
    [
        ("training", "straggler", 132, " · as of step 132 of 150"), ("training", "straggler", 150, ""),
        ("training", "non_finite", 132, ""), ("finished", "straggler", 132, ""),
    ],
)  # fmt: skip
def test_a_live_finding_says_as_of_which_step_it_is(word: str, kind: str, last_step: int, text: str) -> None:
    found = Finding(
        analyzer="test", kind=kind, severity="warning", status="fired", summary="", attempt=0, first_step=60,
        last_step=last_step,
    )  # fmt: skip
    assert as_of(found, RunState(word=word, step=150)) == text


def test_a_link_to_a_finding_that_the_run_does_not_have_is_answered(tmp_path: Path) -> None:
    run, _ = two_runs_with_a_dead_rank(tmp_path)
    app = open_page(run.path.parent, "findings", run="first", finding="hang-0-99-r0")
    wait_for(lambda: "no such finding" in shown(app) or app.run() is None, "the answer", deadline_s=60)


def test_the_overview_of_an_ended_run_lists_findings_as_the_report_does(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=60, kill={1: 20})
    make_run(tmp_path, run=run, attempt=1, ranks=4, steps=120, first_step=11, slow={2: 1.8}, slow_from=40)
    app = open_page(run.path.parent)
    wait_for(lambda: "Straggler" in shown(app) or app.run() is None, "the finding", deadline_s=60)
    text = shown(app)
    assert text.index("Straggler**") < text.index("Rank lost**"), "what is still open first"
    assert "the run continued as attempt 1" in text


@pytest.mark.parametrize("finding", ["", "straggler-1-r2"])
def test_malformed_findings_are_shown_or_left_out_without_an_error(tmp_path: Path, finding: str) -> None:
    run = hostile_run(tmp_path)
    address = {"finding": finding} if finding else {}
    for page in ("findings", "overview"):
        app = open_page(run.path.parent, page, run=run.run_id, **(address if page == "findings" else {}))
        assert not app.exception, [error.value for error in app.exception]
    if finding:
        app = open_page(run.path.parent, "findings", run=run.run_id, **address)
        assert any("Python stack of rank 0" in expander.label for expander in app.expander)


def test_a_finding_keeps_what_it_cost(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=12, end="")
    writer = RankWriter(run, rank=2, ranks=2)
    writer.event(
        "finding", id="straggler-0-r1", analyzer="straggler", finding_kind="straggler", severity="warning",
        status="fired", finding_ranks=[1], first_step=4, last_step=9, cause="compute", summary="slow", evidence={},
        advice="straggler-compute", cost_s=1.25,
    )  # fmt: skip
    writer.close()
    app = open_page(run.path.parent, "findings", run=run.run_id, finding="straggler-0-r1")
    assert not app.exception
    assert "1.25 s" in app.dataframe[0].value["value"].tolist()


@pytest.mark.parametrize("page", ["overview", "findings"])
def test_a_run_that_failed_without_a_finding_gets_no_clean_bill(tmp_path: Path, page: str) -> None:
    run = make_run(tmp_path, ranks=2, steps=12, end="failed")
    app = open_page(run.path.parent, page, run=run.run_id)
    wait_for(lambda: "Read the logs" in shown(app) or app.run() is None, "the verdict", deadline_s=60)
    text = shown(app)
    assert "No problems" not in text
    assert "check_circle" not in text
    assert "-v" not in text, "an option of the command line"


@pytest.mark.parametrize("page", ["overview", "findings"])
def test_a_run_without_steps_is_not_reported_as_healthy(tmp_path: Path, page: str) -> None:
    run = make_run(tmp_path, ranks=2, steps=0)
    app = open_page(run.path.parent, page, run=run.run_id)
    wait_for(lambda: "hourglass_top" in shown(app) or app.run() is None, "the verdict", deadline_s=60)
    assert "No problems" not in shown(app)


def _runbook_page() -> None:
    from dashboard.views.runbook import runbook

    runbook()


def test_the_runbook_lists_its_sections_and_shows_the_one_of_the_address() -> None:
    assert "`rank-lost-signal`" in shown(AppTest.from_function(_runbook_page).run(timeout=100))
    app = AppTest.from_function(_runbook_page)
    app.query_params["section"] = "rank-lost-signal"
    text = shown(app.run(timeout=100))
    assert "A rank died of a signal" in text
    assert "`rank-lost-exit`" not in text
