"""The store of a run is opened once for the queries of a page, ingested when there is something new, and given up."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dashboard.data import shared_store
from dashboard.data.shared_store import SharedStore
from probes.tape.rundir import RunDir
from store import Store
from store.database import connect_writer
from tests.dashboard.opened import open_page, shown
from tests.factories import make_run
from tests.waiting import wait_for

LONG_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that has ended, and has no store yet."""
    found = make_run(tmp_path, steps=5)
    for path in found.stores():
        path.unlink()
    return found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time that a store is opened, whether its tapes are ingested first."""
    found: list[bool] = []
    real = Store.open

    def spied(run: RunDir, *, catch_up: bool = True, **options: Any) -> Store:
        found.append(catch_up)
        return real(run, catch_up=catch_up, **options)

    monkeypatch.setattr(shared_store.Store, "open", spied)
    return found


def ask(shared: SharedStore, *, may_grow: bool = False) -> int:
    with shared.session(may_grow=may_grow) as store:
        return int(store.rows("SELECT count(*) FROM events")[0][0])


def test_queries_that_come_close_together_open_the_store_once(run: RunDir, opened: list[bool]) -> None:
    shared = SharedStore(run)
    assert len({ask(shared) for _ in range(5)}) == 1
    assert opened == [True]


def test_an_ended_run_is_ingested_again_only_when_something_was_written(
    run: RunDir, opened: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_store, "CATCH_UP_S", 0.0)
    shared = SharedStore(run)
    before = ask(shared)
    assert [ask(shared), opened.pop(0), opened] == [before, True, []]
    events = next(path for path in run.event_files() if path.exists())
    with events.open("a") as file:
        file.write(events.read_text().splitlines()[-1] + "\n")  # an event that is there twice counts once
    assert (ask(shared), opened) == (before, [True])


def test_a_run_that_may_grow_is_ingested_again_and_again(
    run: RunDir, opened: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_store, "CATCH_UP_S", 0.0)
    shared = SharedStore(run)
    for _ in range(3):
        ask(shared, may_grow=True)
    assert opened == [True] * 3


@pytest.mark.parametrize("may_grow", [True, False])
def test_the_store_is_released_to_a_writer(run: RunDir, monkeypatch: pytest.MonkeyPatch, *, may_grow: bool) -> None:
    """Of a run that may grow at once, of one that has ended soon after the last query."""
    monkeypatch.setattr(shared_store, "KEPT_S", 0.01 if not may_grow else LONG_S)
    shared = SharedStore(run)
    ask(shared, may_grow=may_grow)
    if not may_grow:
        wait_for(lambda: shared._opened is None, "the store is closed")
    connect_writer(run.store(), wait_s=1.0, threads=1).close()


def test_a_running_query_survives_the_failure_of_another(run: RunDir) -> None:
    shared = SharedStore(run)
    with shared.session(may_grow=False) as first:
        with pytest.raises(ZeroDivisionError), shared.session(may_grow=False):
            raise ZeroDivisionError
        assert first.rows("SELECT 1") == [(1,)]
        assert ask(shared) > 0


def test_a_page_says_that_many_tapes_are_being_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first paint waited twenty seconds for them, and the server's own threads read them."""
    may_read, read = threading.Event(), shared_store.catch_up_in_process
    asked = []

    def held(of: RunDir) -> None:
        asked.append(of.run_id)
        may_read.wait(LONG_S)
        read(of)

    monkeypatch.setattr(shared_store, "CHILD_PROCESS_BYTES", 1)
    monkeypatch.setattr(shared_store, "catch_up_in_process", held)
    app = open_page(run.path.parent, "events", run=run.run_id, until_whole=False)
    assert "Reading the run…" in shown(app)
    may_read.set()
    assert "Reading the run…" not in shown(open_page(run.path.parent, "events", run=run.run_id))
    assert asked == [run.run_id]
