"""Which run a page shows: the one of the address, also where the session has shown another one before."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from store.runs_folder import RunsFolder
from tests.dashboard.opened import open_page, shown
from tests.factories import make_run
from tests.waiting import wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs; `second` is the newest."""
    for name in ("first", "second"):
        run = make_run(tmp_path, ranks=1, steps=5)
        run.path.rename(run.path.with_name(name))
    return run.path.parent


def test_an_address_wins_over_the_run_that_the_session_has_shown(folder: Path) -> None:
    app = open_page(folder, "memory", run="first")
    for name in ("second", "first"):  # as Back and Forward change it
        app.query_params["run"] = name
        app.run()
        assert app.selectbox(key="run_choice").value == name
        assert app.query_params["run"] in (name, [name])
        wait_for(lambda name=name: f"**{name}**" in shown(app) or app.run() is None, "the page", deadline_s=60)


def test_the_list_changes_the_address_and_an_address_without_a_run_keeps_the_last_one(folder: Path) -> None:
    app = open_page(folder, "memory")
    assert app.query_params["run"] in ("second", ["second"])
    app.selectbox(key="run_choice").set_value("first").run()
    assert app.query_params["run"] in ("first", ["first"])
    del app.query_params["run"]
    app.run()
    wait_for(lambda: "**first**" in shown(app) or app.run() is None, "the page", deadline_s=60)


def test_a_run_that_is_not_there_is_named_and_no_other_is_shown_in_its_place(folder: Path) -> None:
    app = open_page(folder, "memory", run="third")
    assert [title.value for title in app.title] == ["No such run"]
    assert "third" in app.text[0].value
    assert app.query_params["run"] in ("third", ["third"])
    app.selectbox(key="run_choice").set_value("first").run()
    wait_for(lambda: "**first**" in shown(app) or app.run() is None, "the page", deadline_s=60)


def test_a_listing_that_fails_once_does_not_lead_to_another_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, calls = RunsFolder.run_ids, itertools.count()
    monkeypatch.setattr(RunsFolder, "run_ids", lambda self: [] if next(calls) == 1 else listed(self))
    app = open_page(folder, "memory", run="first")
    assert not app.exception
    assert app.query_params["run"] in ("first", ["first"])
    wait_for(lambda: "**first**" in shown(app.run()), "the page", deadline_s=60)
