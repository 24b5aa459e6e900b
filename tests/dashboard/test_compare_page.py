"""Two runs side by side: what differs is there, names cannot deceive, and an answer that is old or failed says so."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.data import run_access as access
from dashboard.data import shared_store
from dashboard.data.background_answers import Answer, Answers
from dashboard.views import compare as page
from probes.tape.rundir import RunDir
from tests.dashboard.opened import charts, open_page, shown
from tests.factories import make_run
from tests.waiting import wait_for


def two_runs(tmp_path: Path, *, name: str = "slower") -> Path:
    """`before`, and one whose rank 1 computes twice as long and whose loss is higher."""
    before = make_run(tmp_path, ranks=2, steps=60, step_ms=20.0, config={"optim": {"lr": 0.1}})
    before.path.rename(before.path.with_name("before"))
    after = make_run(
        tmp_path, ranks=2, steps=60, step_ms=20.0, slow={1: 2.0}, loss=lambda step: 3.0, seed=1,
        config={"optim": {"lr": 0.2}},
    )  # fmt: skip
    after.path.rename(after.path.with_name(name))
    return before.path.parent


def compared(app: AppTest) -> AppTest:
    wait_for(
        lambda: "is better" in shown(app) or app.run() is None,
        "the comparison",
        deadline_s=200,
    )
    return app


def test_speed_settings_and_losses_of_two_runs_stand_beside_one_another(tmp_path: Path) -> None:
    app = compared(open_page(two_runs(tmp_path), "compare", run="slower"))
    assert not app.exception
    text = shown(app)
    assert text.count(" is better than ") == 1
    assert "per token" in text
    assert "differs from step 1 on" in text
    assert len(charts(app)) == 1
    tables = {tuple(table.value.columns): table.value for table in app.dataframe}
    assert set(tables) == {("", "before", "slower")}
    settings = app.dataframe[0].value.set_index("")
    assert settings.loc["optim.lr"].tolist() == ["0.1", "0.2"]
    assert "Step, ms (mean over the ranks)" in {element.value for element in app.subheader}


def test_settings_that_only_one_run_has_are_one_row_of_the_page(tmp_path: Path) -> None:
    folder = two_runs(tmp_path)
    many = {f"key{number}": number for number in range(20)}
    script = make_run(tmp_path, ranks=2, steps=60, step_ms=20.0, config={"optim": {"lr": 0.3, **many}})
    script.path.rename(folder / "more")
    app = open_page(folder, "compare", run="more", **{"with": "before"})
    wait_for(lambda: len(app.dataframe) > 1 or app.run() is None, "the comparison", deadline_s=200)
    assert not app.exception
    settings = app.dataframe[0].value.set_index("")
    assert settings.index.tolist() == ["optim.lr", "only in this run"]


def test_a_name_with_control_signs_is_shown_without_them(tmp_path: Path) -> None:
    app = compared(open_page(two_runs(tmp_path, name="\u202eolleh\x1b[31m"), "compare", run="before"))
    assert not app.exception
    options = [option for box in app.selectbox for option in box.options]
    headings = [str(column) for table in app.dataframe for column in table.value.columns]
    for text in (*options, *headings, shown(app)):
        assert "\u202e" not in text
        assert "\x1b" not in text
    assert any("olleh" in text for text in options)


def test_an_answer_that_is_old_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, broken = access.RunAccess.compared_with, ValueError("no \x1bcomparison today")
    with_error = False

    def old(self: access.RunAccess, other: access.RunAccess) -> Answer:
        return replace(asked(self, other), is_fresh=False, error=broken if with_error else None)

    monkeypatch.setattr(access.RunAccess, "compared_with", old)
    app = compared(open_page(two_runs(tmp_path), "compare", run="slower"))
    assert "A newer comparison is being computed." in shown(app)
    with_error = True
    app.run()
    assert not app.exception
    assert "cannot be compared now. The last comparison is shown" in shown(app)
    assert "no \ufffdcomparison today" in shown(app)
    assert "is better" in shown(app)


def test_two_ended_runs_whose_tapes_are_not_ingested_are_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked, read = two_runs(tmp_path), access.compare, shared_store.SharedStore._open
    counted: list[int] = []
    free = threading.Event()
    for store in folder.glob("*/telemetry.duckdb*"):
        store.unlink()

    def late(self: shared_store.SharedStore, *, may_grow: bool) -> Any:
        assert free.wait(60)
        return read(self, may_grow=may_grow)

    monkeypatch.setattr(shared_store.SharedStore, "_open", late)
    monkeypatch.setattr(access, "compare", lambda *sides: counted.append(1) or asked(*sides))
    answers = Answers()
    before, slower = (access.RunAccess(RunDir(folder / name), answers) for name in ("before", "slower"))
    slower.compared_with(before)
    free.set()
    wait_for(lambda: slower.compared_with(before).is_fresh, "the comparison", deadline_s=200)
    answers.close()
    assert counted == [1]


def test_two_runs_that_cannot_be_compared_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = two_runs(tmp_path)
    monkeypatch.setattr(access, "compare", lambda *_: 1 / 0)
    app = open_page(folder, "compare", run="slower")
    wait_for(lambda: "cannot be compared" in shown(app) or app.run() is None, "the complaint", deadline_s=60)
    assert not app.exception


def three_runs(tmp_path: Path) -> Path:
    """`before`, then `slower`, then `half`, which takes half the time of `before`."""
    folder = two_runs(tmp_path)
    make_run(tmp_path, ranks=2, steps=60, step_ms=10.0, config={"optim": {"lr": 0.1}}).path.rename(folder / "half")
    for age, name in enumerate(("half", "slower", "before")):
        os.utime(folder / name / "run.json", (2e9 - age, 2e9 - age))
    return folder


@pytest.mark.timeout(300)
def test_three_runs_against_the_oldest_with_significance_in_words(tmp_path: Path) -> None:
    app = open_page(three_runs(tmp_path), "compare", run="half", **{"with": ["before", "slower"]})

    def rows() -> dict[str, dict[str, str]]:
        assert not app.exception, [error.value for error in app.exception]
        tables = [table.value for table in app.dataframe if "run" in table.value.columns]
        return {row["run"]: row for row in tables[0].to_dict("records")} if tables else {}

    wait_for(lambda: len(rows()) == 3 or app.run() is None, "the comparisons", deadline_s=280)
    assert app.selectbox(key="baseline").value == "before", "the oldest"
    found = rows()
    assert set(found) == {"before", "slower", "half"}
    assert found["slower"]["speed"].startswith("slower: ")
    assert found["half"]["speed"].startswith("faster: ")
    assert "beyond its noise" in found["slower"]["loss"]
    assert (found["slower"]["settings"], found["half"]["settings"]) == ("optim.lr", "the same")
    settings = next(table.value for table in app.dataframe if list(table.value.columns)[:2] == ["", "before"])
    assert settings.set_index("").loc["optim.lr"].to_dict() == {"before": "0.1", "slower": "0.2", "half": "0.1"}


def test_a_link_with_a_baseline_alone_compares_those_two(tmp_path: Path) -> None:
    app = open_page(three_runs(tmp_path), "compare", run="half", baseline="slower")
    assert not app.exception
    assert app.multiselect(key="with").value == ["slower"]
    assert app.selectbox(key="baseline").value == "slower"
    app.multiselect(key="with").set_value([]).run()
    assert "Choose at least one other run" in shown(app)


@pytest.mark.parametrize(
    ("names", "headings"),
    [
        (("demo-20261127-051125", "demo-20261127-051335"), ("…051125", "…051335")),
        (("ok-20261127", "slow-20261127"), ("ok-20261127", "slow-20261127")),
        (("demo", "demo-2"), ("demo", "demo-2")),
        (("demo-1", "demo-1"), ("…1", "…1")),
    ],
)  # fmt: skip
def test_headings_leave_out_what_both_names_begin_with(names: tuple[str, str], headings: tuple[str, str]) -> None:
    assert page.without_common_prefix(*names) == headings


def test_a_long_sentence_of_a_finding_is_cut_between_words_and_its_row_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell of fixed height showed the upper half of its last line."""
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr(page, "table", lambda rows, **more: drawn.append({"rows": rows, **more}))
    monkeypatch.setattr("streamlit.subheader", lambda *_, **__: None)
    sentences = ["Rank 1 was slow.", "word " * 20, "word " * 100]
    for sentence in sentences:
        monkeypatch.setattr(page, "tables", lambda _, text=sentence: [("Finding", [("STRAGGLER", text.strip(), "-")])])
        page._details("before", "after", None)  # type: ignore[arg-type]
    short, middle, long = drawn
    assert short["row_height"] is None
    assert list(middle["rows"].values())[1] == [sentences[1].strip()]
    (cut,) = list(long["rows"].values())[1]
    assert cut.endswith("word …")
    for one in (middle, long):
        (text,) = list(one["rows"].values())[1]
        assert one["row_height"] > 18 * len(text) / 25
