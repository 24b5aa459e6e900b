"""A store that is opened again shows what was written in between, and leaves the file to writers meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import RunDir
from store import Ingester, Store, StoreError, views
from store.runs.cached_store import CachedStore
from tests.factories import RankWriter, make_run


@pytest.fixture(autouse=True)
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run of more than half a minute."""
    monkeypatch.setattr(views, "_FEW_ROWS", 0)


def ingest(run: RunDir) -> None:
    with Ingester(run, 0) as ingester:
        ingester.catch_up()


def seen(store: Store) -> list[tuple[int, ...]]:
    return store.rows("SELECT attempt, count(*), max(step) FROM steps GROUP BY ALL ORDER BY ALL")


def test_what_was_written_in_between_is_seen_and_the_views_are_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5, end="")
    ingest(run)
    with CachedStore(run) as kept:
        with kept.opened() as store:
            assert seen(store) == [(0, 10, 5)]
            assert store.has("steps")
        first = kept._connection
        make_run(tmp_path, run=run, ranks=2, attempt=1, steps=3)
        ingest(run)  # it has the file for itself
        with kept.opened() as store, Store.open(run, catch_up=False) as fresh:
            assert kept._connection is first
            assert seen(store) == seen(fresh) == [(0, 10, 5), (1, 6, 3)]
            events = "SELECT kind, count(*) FROM events GROUP BY ALL ORDER BY ALL"
            assert store.rows(events) == fresh.rows(events)
            with pytest.raises(StoreError):
                store.rows("SELECT * FROM read_csv('/etc/passwd')")
        run.store(0).unlink()
        ingest(run)  # rebuilt from the tapes
        with kept.opened() as store:
            assert seen(store) == [(0, 10, 5), (1, 6, 3)]


def test_copies_of_few_rows_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    run = make_run(tmp_path, ranks=1, steps=5, end="")
    with CachedStore(run) as kept:
        for attempt in range(1, 3):
            ingest(run)
            with kept.opened() as store:
                assert [one for one, *_ in seen(store)] == [*range(attempt)]
            make_run(tmp_path, run=run, ranks=1, attempt=attempt, steps=3)


def test_a_failure_in_the_block_leaves_the_file_free(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=5)
    ingest(run)
    kept = CachedStore(run)
    with pytest.raises(ZeroDivisionError), kept.opened():
        _ = 1 / 0
    ingest(run)
    with kept, kept.opened(node=0) as store:
        assert seen(store) == [(0, 5, 5)]
    with pytest.raises(StoreError, match="no store yet"), kept.opened(node=1):
        pass


def test_norms_that_are_computed_from_parts_are_never_old(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=5, end="")
    ingest(run)
    norms = "SELECT step, grad_norm FROM steps WHERE attempt = 1 ORDER BY step"
    with CachedStore(run) as kept:
        with kept.opened():
            pass
        writer = RankWriter(run, 0, attempt=1)
        for step in (1, 2):
            writer.append("steps", COMPLETE, step=step, start_ns=writer.now_ns, duration_ns=1000)
            writer.append("scalars", COMPLETE, step=step, name="grad_norm_part 1 of a", value=3.0)
            ingest(run)
            with kept.opened() as store, Store.open(run, catch_up=False) as fresh:
                assert str(store.rows(norms)) == str(fresh.rows(norms))
                assert len(store.rows(norms)) == step
        writer.close()
