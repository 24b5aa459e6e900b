"""The table of runs: tags and notes are shown and filtered by, and several runs are chosen to be compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.data.background_answers import Answers
from dashboard.data.run_access import RunAccess
from dashboard.views import home
from probes.tape.redaction.printable import visible
from store.runs.run_notes import RunNotes, write_notes
from store.runs_folder import RunsFolder
from tests.dashboard.opened import open_page, shown
from tests.factories import make_run
from tests.waiting import wait_for


def names(app: AppTest) -> list[str]:
    assert not app.exception, [error.value for error in app.exception]
    return sorted(shown_name(address) for address in app.dataframe[0].value["run"]) if app.dataframe else []


def shown_name(address: str) -> str:
    """The name that the table shows of a link, as the browser takes it from the address."""
    found = re.search(home._SHOWN_NAME, address)
    return unquote(found[1]) if found else address


def test_runs_are_found_by_tag_and_note(tmp_path: Path) -> None:
    runs = {}
    for name in ("first", "second", "third"):
        run = make_run(tmp_path, ranks=1, steps=5)
        run.path.rename(run.path.with_name(name))
        runs[name] = type(run)(run.path.with_name(name))
    folder = runs["first"].path.parent
    assert "tags" not in open_page(folder, "home").dataframe[0].value.columns, "no column of nothing"
    write_notes(runs["first"], RunNotes(tags=("baseline",), text="warm-up of 100 steps"))
    write_notes(runs["third"], RunNotes(tags=("baseline-2",), text="<b>bold</b> \u202eback"))
    app = open_page(folder, "home")
    assert names(app) == ["first", "second", "third"]
    table = app.dataframe[0].value
    table = table.set_index(table["run"].map(shown_name))
    assert list(table.loc["first", "tags"]) == ["baseline"]
    assert "\u202e" not in table.loc["third", "note"]
    for words, expected in (
        ("tag:baseline", ["first"]), ("baseline", ["first", "third"]), ("warm-up steps", ["first"]),
        ("second", ["second"]),
    ):  # fmt: skip
        app = open_page(folder, "home", filter=words)
        wait_for(lambda app=app, expected=expected: names(app) == expected, f"the runs of {words}")
    assert "No run matches" in shown(open_page(folder, "home", filter="tag:base"))


@pytest.mark.parametrize("name", ["first", "a b+c", "50%&x=1", "n\u00e4chste", "back\u202ewards", "a#b?c"])
def test_the_name_of_a_run_is_a_link_to_its_overview(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, ranks=1, steps=5)
    run.path.rename(run.path.with_name(name))
    app = open_page(run.path.parent, "home")
    (address,) = app.dataframe[0].value["run"]
    parts = urlsplit(address)
    assert (parts.path, parse_qs(parts.query)) == ("overview", {"run": [name]})
    assert shown_name(address) == visible(name)


def test_an_ended_run_has_one_version_before_and_after_its_state_is_known(tmp_path: Path) -> None:
    """Each run of the table was summarised twice: while its state was unknown it counted as growing."""
    run = make_run(tmp_path, ranks=1, steps=5)
    known, unknown = RunAccess(run, Answers()), RunAccess(run, Answers())
    assert known.state(first_s=60.0).value.word == "finished"
    assert unknown.version() == known.version()


def test_cells_of_an_ended_run_are_read_again_only_when_its_folder_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, ranks=1, steps=5)
    folder, read = RunsFolder(run.path.parent), home._read_row
    reads: list[Path] = []

    def counted(path: Path, *, is_read: bool) -> dict[str, Any]:
        reads.append(path)
        return read(path, is_read=is_read)

    monkeypatch.setattr(home, "_read_row", counted)

    def row() -> dict[str, Any]:
        return home._row(folder, run.run_id, is_read=True)

    def is_kept() -> bool:
        before = len(reads)
        return bool(row()["state"]) and len(reads) == before

    wait_for(is_kept, "cells that are not read again")
    assert row()["age"].endswith(" ago")
    write_notes(run, RunNotes(tags=("baseline",)))
    assert row()["tags"] == ["baseline"]
    wait_for(is_kept, "cells that are not read again")


def test_a_run_whose_records_are_not_read_does_not_look_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cell says that nothing was found."""
    monkeypatch.setattr(home, "MAX_SUMMARIES", 1)
    make_run(tmp_path, ranks=1, steps=5)
    folder = make_run(tmp_path, ranks=1, steps=5).path.parent
    app = open_page(folder, "home")
    newest, oldest = app.dataframe[0].value[["finding", "state"]].to_dict("records")
    assert newest["finding"] in ("reading…", "analyzing…", "")
    assert oldest == {"finding": "not read", "state": "not read"}
    assert "The newest 1 of these 2 matching runs are read" in shown(app)
