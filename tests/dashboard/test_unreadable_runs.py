"""Runs that cannot be read, or not yet, give a page that says why and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.data import shared_store
from probes.tape.rundir import RunDir
from tests.dashboard.opened import PAGES, open_page, shown
from tests.depth import usually
from tests.factories import make_run
from tests.waiting import wait_for


def test_an_empty_folder_says_how_to_start_a_run(tmp_path: Path) -> None:
    app = open_page(tmp_path)
    assert not app.exception
    assert "No runs yet" in shown(app)
    assert f"rankscope train gpt-demo --set run.dir={tmp_path}" in shown(app)


@pytest.mark.parametrize("page", usually(PAGES, later=PAGES.keys() - {"home", "overview", "sql", "fleet"}))
def test_a_run_of_a_newer_schema_asks_for_an_update(tmp_path: Path, page: str) -> None:
    run = RunDir.create(tmp_path, name="newer", manifest={})
    run.write_manifest(run.manifest() | {"schema_version": 99})
    app = open_page(tmp_path, page)
    wait_for(lambda: "update rankscope" in shown(app) or (app.run() and False), "the reason")  # of Fleet: by a child
    assert not app.exception


@pytest.mark.parametrize("page", PAGES)
def test_a_run_that_has_only_begun_gives_calm_pages(tmp_path: Path, page: str) -> None:
    run = RunDir.create(tmp_path, name="begun", manifest={})
    (run.path / "run.json").write_text('{"run_id": "beg')  # cut off in the middle
    app = open_page(tmp_path, page)
    assert not app.exception, [error.value for error in app.exception]
    assert app.title[0].value


def test_a_run_without_a_watch_is_read_from_its_tapes(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=12)
    for store in run.stores():
        store.unlink()
    app = open_page(run.path.parent)
    assert not app.exception
    assert "Step: 12" in shown(app)


# page -> what stands there although the store is held: it needs no store, or reads the tapes into a copy
READ_ANYHOW = {
    "home": "Select one run to open it here",
    "overview": "Step: 12", "findings": "No problems found", "goodput": "Goodput: ", "ranks": "Slowest first",
    "timeline": "Top: phases", "collectives": "Bandwidth", "pipeline": "no pipeline", "numerics": "Learning rate",
    "memory": "By rank", "health": "No health", "recovery": "Rollbacks", "compare": "only one run", "sql": "Tables",
    "logs": "has no logs", "events": "events, the newest first", "configuration": "No settings are recorded",
    "system": "Topology",
}  # fmt: skip


HOLDER = """
import duckdb, sys
while True:
    try:
        held = duckdb.connect({path})
        break
    except duckdb.IOException:  # the page keeps it open for a moment
        pass
print("held", flush=True)
sys.stdin.read()
"""


def test_a_store_held_by_another_process_is_named_and_read_once_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_a_held_store(tmp_path, monkeypatch, ("home", "overview", "findings", "sql"))


def read_a_held_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: Iterable[str]) -> None:
    """Open each page while another process holds the run's store, and once more when it is free."""
    monkeypatch.setattr(shared_store, "WAIT_S", 0.1)  # each of the pages' queries waits so long for the holder
    run = make_run(tmp_path, ranks=2, steps=12)
    assert "Step: 12" in shown(open_page(run.path.parent))  # the store is made
    held = json.dumps(str(run.store()))
    program = HOLDER.format(path=held)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        # Whenever it is time to look at the tapes again, the records are read into a copy instead.
        apps = {}
        for page in pages:  # all of one run
            app = apps[page] = open_page(run.path.parent, page, until_whole=False)
            told = ("Another process has the store open", READ_ANYHOW[page])

            def is_told(app: AppTest = app, told: tuple[str, ...] = told) -> bool:
                text = shown(app.run())
                return any(words in text for words in told)

            wait_for(is_told, f"the complaint, or the copy, on {page}", deadline_s=60)
            assert not app.exception, page
            assert "could not be computed" not in shown(app), page
        holder.stdin.close()
        holder.wait(60)
    for page, app in apps.items():
        wait_for(
            lambda app=app: "has the store open" not in shown(app.run()), f"{page} without the complaint", deadline_s=60
        )  # type: ignore[misc]
