"""What each page shows of a real run, and that nothing of a hostile one is obeyed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from tests.analyzers.report.hostile import SCRIPT, hostile_run
from tests.dashboard.opened import PAGES, charts, open_page, shown
from tests.e2e.launched import LaunchedRun
from tests.waiting import wait_for

# page -> words that stand on it for a run of two ranks with a NaN that was rolled back
EXPECTED = {
    "home": ("Runs", "Select one run to open it here"),
    "overview": ("finished", "Non-finite", "step 12", "Step: 24", "Tokens/s", "Where the time went"),
    "findings": ("Non-finite", "step 12", "Severity"),
    "goodput": ("Goodput: ", "Steps kept: 24", "By rank"),
    "ranks": ("Slowest first", "In the mesh", "Two ranks"),
    "timeline": ("Top: phases",),
    "collectives": ("Exposed: ", "Waiting", "Bandwidth"),
    "pipeline": ("This run has no pipeline",),
    "numerics": ("Gradient norm by parameter", "NaN and Inf", "Learning rate"),
    "memory": ("Rank and step", "By rank"),
    "health": ("Health",),
    "recovery": ("Rollbacks", "Good: complete"),
    "logs": ("without a line",),
    "events": ("Left out unless chosen", "Select one"),
    "configuration": ("Command", "settings, defaults included"),
    "system": ("Versions", "Topology", "Process groups", "Ranks: 2"),
    "compare": ("There is only one run",),
    "sql": ("Tables", "rows in"),
    "fleet": ("Runs: ", "Hosts", "No host or device has more trouble than chance explains."),
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_a_real_run(runs: Path, page: str) -> None:
    app = open_page(runs, page)

    def missing() -> list[str]:
        assert not app.exception, [error.value for error in app.exception]
        text = shown(app) + "\n".join(str(widget.label) for widget in (*app.get("button_group"), *app.selectbox))
        return [words for words in EXPECTED[page] if words not in text]

    # What takes long comes at a later look, as on a page that polls.
    wait_for(lambda: not missing() or (app.run() and False), f"{missing()} on {page}", deadline_s=100)


def test_the_recovery_page_lists_the_rollback_and_its_batch(runs: Path) -> None:
    app = open_page(runs, "recovery")
    wait_for(lambda: app.dataframe or (app.run() and False), "the table of rollbacks")
    (row,) = app.dataframe[0].value.to_dict("records")
    assert (row["from step"], row["skipped batches"], row["trained again"]) == (12, "", "11")


def test_the_overview_tells_the_state_and_the_age_of_the_last_record(runs: Path) -> None:
    text = shown(open_page(runs))
    assert re.search(r"last record \d+ (s|min|h)", text), text


def test_a_link_opens_the_finding_with_its_evidence_response_and_runbook(runs: Path, finished_run: LaunchedRun) -> None:
    (finding,) = finished_run.findings("non_finite")
    assert finding["link"].startswith("/findings?run=")
    app = open_page(runs, "findings", run=finished_run.run.run_id, finding=finding["id"])
    assert not app.exception
    text = shown(app)
    for words in (
        "Inputs of collectives in step 12, before they were reduced",
        "NaN and Inf in the gradients of step 12, by parameter and the rank that holds it",
        "Loss and gradient norm around the finding",
        "Runbook",
        "kept batch 11",
        "Response",
        "In the backward pass",
    ):
        assert words in text, (words, text)
    assert len(charts(app)) == 3


def test_the_short_link_leads_to_the_same_finding(runs: Path, finished_run: LaunchedRun) -> None:
    (finding,) = finished_run.findings("non_finite")
    app = open_page(runs, "home", run=finished_run.run.run_id, finding=finding["id"])
    assert app.title[0].value == "Findings"
    assert "finding" in app.query_params, "no redirect: Back leads to the page before"
    assert open_page(runs, "home", run=finished_run.run.run_id).title[0].value == "Overview"


def test_the_table_of_runs_has_state_finding_and_loss_of_each(runs: Path, finished_run: LaunchedRun) -> None:
    app = open_page(runs, "home")
    wait_for(lambda: (app.dataframe[0].value["state"] != "").all() or (app.run() and False), "the summaries")
    line = app.dataframe[0].value.set_index("run").loc[f"overview?run={finished_run.run.run_id}"]
    assert (line["state"], line["severity"], line["finding"], line["step"]) == (
        "finished",
        "warning",
        "Non-finite",
        "24",
    )
    assert len(line["losses"]) == 24
    assert line["loss"] == f"{float(line['loss']):.4f}"
    app.text_input(key="filter").set_value("no-such").run()
    assert "No run matches the filter." in shown(app)
    app.text_input(key="filter").set_value("non-finite FINISHED").run()
    assert len(app.dataframe) == 1
    links = {link.proto.label: link.proto.disabled for link in app.get("page_link")}
    assert links["Open"], "no run is selected"
    assert not links["Overview"]


def test_the_address_names_a_rank_and_a_step(runs: Path) -> None:
    app = open_page(runs, "ranks", rank="1", step="12")
    wait_for(
        lambda: ("Rank 1 in step 12" in shown(app) and len(app.dataframe) >= 3) or (app.run() and False), "the panel"
    )
    assert not app.exception
    account = app.dataframe[0].value.set_index("account")
    parts = account.drop("step")["this rank"].sum()
    assert parts == pytest.approx(account.loc["step", "this rank"], rel=0.01), "the classes add up to the step"
    calls = app.dataframe[1].value
    assert {"all_gather", "reduce_scatter"} & set(calls["operation"]) or set(calls["operation"]) == {"all_reduce"}
    assert "non_finite" in str(app.dataframe[2].value.to_dict())
    for step in ("999", "-1", "x" * 30):
        assert not open_page(runs, "ranks", rank="1", step=step).exception
    assert "This rank has no such step." in shown(open_page(runs, "ranks", rank="7", step="3"))


def test_findings_are_filtered_by_kind_and_rank(runs: Path) -> None:
    app = open_page(runs, "findings")
    assert "Non-finite" in shown(app)
    app.text_input(key="rank").set_value("7").run()
    assert "No finding matches the filter." in shown(app)
    app.text_input(key="rank").set_value("1").run()
    assert "Non-finite" in shown(app)


def test_the_link_of_an_alert_shows_the_findings_of_its_kind(runs: Path, finished_run: LaunchedRun) -> None:
    run = finished_run.run.run_id

    def filtered(**address: str) -> AppTest:
        app = open_page(runs, "findings", run=run, **address)
        wait_for(lambda: "Severity" in str([w.label for w in app.get("button_group")]) or (app.run() and False), "list")
        assert not app.exception
        return app

    app = filtered(kind="non_finite", rank="1")
    assert (app.multiselect(key="kind").value, app.text_input(key="rank").value) == (["non_finite"], "1")
    assert "Non-finite" in shown(app)
    app.multiselect(key="kind").set_value([]).run()
    assert app.multiselect(key="kind").value == [], "the reader's own filter stays"
    app = filtered(kind="non_finite", rank="7")
    assert "No finding matches the filter." in shown(app)
    for kind in ("no_such_kind", "<script>", "x" * 3000):
        assert filtered(kind=kind).multiselect(key="kind").value == []


def test_the_measure_of_the_heatmap_can_be_chosen(runs: Path) -> None:
    app = open_page(runs, "ranks")
    before = len(charts(app))
    app.segmented_control(key="measure").set_value("memory").run()
    wait_for(lambda: len(charts(app)) == before or (app.run() and False), "the heatmap of the memory")
    assert not app.exception
    assert before >= 3


def test_the_timeline_forgets_its_zoom_with_other_steps_or_ranks(runs: Path) -> None:
    app = open_page(runs, "timeline")

    def revision() -> str:
        (drawn,) = wait_for(lambda: charts(app) or (app.run() and []), "the chart")  # other steps are read first
        revision: str = json.loads(drawn.proto.bytes)["figure"]["layout"]["uirevision"]
        return revision

    seen = [revision()]
    app.run()
    assert revision() == seen[0]
    app.number_input(key="timeline-last").set_value(10).run()
    seen.append(revision())
    app.multiselect(key="timeline-ranks").set_value([1]).run()
    seen.append(revision())
    assert len(set(seen)) == 3


def test_a_name_of_a_run_that_is_not_there_opens_no_file_and_no_other_run(
    runs: Path, finished_run: LaunchedRun
) -> None:
    for run in ("../../etc", "/etc/passwd", "nothing", "..%2f..", "x" * 3000):
        app = open_page(runs, run=run)
        assert not app.exception
        assert [title.value for title in app.title] == ["No such run"]
        assert app.selectbox(key="run_choice").options == [finished_run.run.run_id]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = hostile_run(tmp_path_factory.mktemp("hostile"))
    name = "<img src=x onerror=alert(1)>:red[run] $x$"
    run.path.rename(run.path.parent / name)
    return run.path.parent


@pytest.mark.parametrize("page", PAGES)
def test_nothing_of_a_hostile_run_is_obeyed(hostile: Path, page: str) -> None:
    app = open_page(hostile, page)
    assert not app.exception, [error.value for error in app.exception]
    for element in app.get("markdown"):
        assert not element.proto.allow_html
        assert not re.search(r"(?<!\\)<[a-z/]", element.value), element.value[:300]
        assert not re.search(r"(?<!\\)!?\[[^\]]*\]\(http", element.value), element.value[:300]
    styles = [element.proto.body for element in app.get("html")]
    assert all("<style>" in body and SCRIPT not in body for body in styles)
    controls = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
    assert not controls.search(shown(app)), shown(app)[:500]
