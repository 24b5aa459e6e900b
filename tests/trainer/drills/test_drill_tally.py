"""A drill's totals, table, JSON and page, over rows made up for it."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from tests.rankscope.test_json_schema import checked
from trainer.config.config import Config
from trainer.drills.command import drill_page
from trainer.drills.scenario import DrillPlan, Scenario, plan_drill
from trainer.drills.score import Answer, Score, Statement
from trainer.drills.table import DrillView, print_result
from trainer.drills.tally import Row, Tally

PLAN = plan_drill(Config(), ["none", "kill", "nan_grad", "pause"], meshes=["ddp"], seeds=1, num_ranks=4)
NONE, KILL, NAN, PAUSE = PLAN.scenarios
LOST = Statement(kind="rank_lost", cause="signal", ranks=(1,), summary="rank 1 died")
SLOW = Statement(kind="straggler", cause="compute", ranks=(3,), summary="rank 3 is slow")


def row(scenario: Scenario, **score: object) -> Row:
    base = Score(recovered=True, ended="finished", useful_s=6.0, span_s=10.0)
    return Row(scenario=scenario, score=replace(base, **score), wall_s=12.0)  # type: ignore[arg-type]


def answer(fault: str, **more: object) -> Answer:
    base = Answer(fault=fault, rank=1, injected=True, seen="live", right_rank=True, right_cause=True, finding=LOST)
    return replace(base, **more)  # type: ignore[arg-type]


GOOD = row(KILL, answers=(answer("kill", finding_s=0.5),), num_right=1, training_s=8.0, steps_lost=2)
UNSEEN = row(NAN, answers=(answer("nan_grad", seen="", right_rank=False, right_cause=False, finding=None),))
ALARMED = row(PAUSE, false_alarms=(SLOW,))


def tally(*rows: Row) -> Tally:
    return Tally(list(rows))


def test_all_is_well() -> None:
    total = tally(row(NONE), GOOD)
    assert (total.recall, total.precision, total.right_rank, total.right_cause) == (1.0, 1.0, 1.0, 1.0)
    assert (total.unrecovered, total.goodput, total.failed) == (0, 0.6, False)
    assert (total.finding_s, total.training_s) == (0.5, 8.0)


def test_what_was_not_seen_costs_recall_and_fails() -> None:
    total = tally(GOOD, UNSEEN)
    assert (total.recall, total.right_rank, total.precision, total.failed) == (0.5, 1.0, 1.0, True)
    assert UNSEEN.problems == ("nan_grad was not found.",)


def test_the_wrong_rank_costs_right_rank_and_precision() -> None:
    wrong = row(KILL, answers=(answer("kill", right_rank=False),))
    total = tally(GOOD, wrong)
    assert (total.recall, total.right_rank, total.precision, total.failed) == (1.0, 0.5, 0.5, False)
    assert not wrong.passed


def test_a_false_alarm_costs_precision() -> None:
    total = tally(GOOD, ALARMED)
    assert (total.recall, total.precision, total.failed) == (1.0, 0.5, False)
    assert ALARMED.problems == ("False alarm: rank 3 is slow",)


@pytest.mark.parametrize(
    "bad",
    [
        row(KILL, recovered=False, problems=("there was no restart",)),
        Row(scenario=KILL, score=Score(injected=False), wall_s=180.0, problem="did not end within 180 s"),
    ],
)
def test_what_did_not_recover_is_counted_and_fails(bad: Row) -> None:
    total = tally(GOOD, bad)
    assert (total.unrecovered, total.failed) == (1, True)
    assert bad.problems


def test_nothing_gives_no_ratio() -> None:
    empty = tally()
    assert (empty.recall, empty.precision, empty.right_rank, empty.goodput) == (None, None, None, None)


def test_json_has_the_totals_on_top() -> None:
    shown = json.loads(json.dumps(tally(GOOD, UNSEEN, ALARMED).to_json()))
    checked("drill", shown)
    assert [shown[key] for key in ("recall", "precision", "right_rank", "unrecovered")] == [0.5, 0.5, 1.0, 0]
    assert [run["fault"] for run in shown["runs"]] == ["kill", "nan_grad", "pause"]
    assert shown["runs"][0]["answers"][0]["finding_s"] == 0.5


def test_the_table_shows_each_run_and_what_was_wrong() -> None:
    console = Console(width=140, record=True, no_color=True)
    print_result(tally(row(NONE), GOOD, UNSEEN, ALARMED), PLAN, console)
    text = console.export_text()
    (line,) = [line for line in text.splitlines() if line.startswith("F1 kill")]
    assert line.split()[-6:] == ["0.5", "s", "8.0", "s", "2", "yes"]
    assert "nan_grad was not found." in text
    assert "False alarm: rank 3 is slow" in text
    assert "recall 50.0 %" in text


def test_one_run_is_no_plural() -> None:
    console = Console(width=140, record=True, no_color=True)
    print_result(tally(GOOD), PLAN, console)
    print_result(tally(row(NONE)), PLAN, console)
    print_result(tally(GOOD, UNSEEN), PLAN, console)
    text = console.export_text()
    for head in ("1 run, 1 finding expected ", "1 run, 0 findings expected ", "2 runs, 2 findings expected "):
        assert head in text


def test_the_last_line_on_a_terminal_leaves_room_for_the_echo_of_ctrl_c() -> None:
    """In a full line, ^C began a line that was not erased: the head of the table stood twice."""
    console = Console(width=60, record=True, force_terminal=True, file=io.StringIO())
    view = DrillView(PLAN, console)
    view.run_started(0, KILL)
    view.run_printed("step " * 40)
    view.run_ended(GOOD)
    console.print(view._draw())
    last = console.export_text().splitlines()[-1]
    assert "step step" in last
    assert len(last) <= console.width - len("^C^C")


def test_the_page_stands_alone_and_is_escaped() -> None:
    hostile = Statement(kind="rank_lost", cause="signal", ranks=(1,), summary="<script>alert(1)</script>")
    plan = DrillPlan(scenarios=PLAN.scenarios, skipped=(("missing_send", "ddp", "needs a pipeline"),))
    page = drill_page(
        tally(row(KILL, answers=(answer("kill", finding=hostile),)), ALARMED), plan, title="<b>my</b>.toml"
    )
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "&lt;b&gt;my&lt;/b&gt;.toml" in page
    assert "http" not in page
    assert "src=" not in page
    assert "missing_send on ddp" in page
