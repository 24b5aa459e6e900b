from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from analyzers.diagnose import diagnose
from analyzers.run.records.cached_source import CachedSource
from analyzers.run.records.event_log import Event, EventLog
from analyzers.source import Source, lacking
from probes.tape.events import EventWriter
from store import Store
from store.database import StoreError
from store.plugins.process import QueryLimitError, answered
from tests.factories import make_run


class Counted:
    """A source that counts how often each question was asked, and how many rows it got."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.asked: Counter[tuple[str, str]] = Counter()
        self.longest: Counter[tuple[str, str]] = Counter()
        self.has = source.has

    def query(self, sql: str, params: Any = ()) -> dict[str, Any]:
        self.asked[sql, repr(params)] += 1
        return self._source.query(sql, params)

    def rows(self, sql: str, params: Any = ()) -> list[tuple[Any, ...]]:
        self.asked[sql, repr(params)] += 1
        found = self._source.rows(sql, params)
        self.longest[sql, repr(params)] = len(found)
        return found


def test_a_short_query_is_executed_once(tmp_path: Path) -> None:
    with Store.open(make_run(tmp_path, ranks=2, steps=1001)) as store:
        counted = Counted(store)
        asked = CachedSource(counted)
        one = "SELECT count(*) FROM steps WHERE rank = ?"
        first = asked.rows(one, [0])
        first.clear()  # by who asked
        assert asked.rows(one, [0]) == [(1001,)]
        assert asked.rows(one, [7]) == [(0,)]
        assert set(counted.asked.values()) == {1}
        for _ in range(2):
            assert len(asked.rows("SELECT step FROM steps WHERE rank = 0")) == 1001
            with pytest.raises(StoreError):
                asked.rows("SELECT nothing FROM steps")
        assert sorted(counted.asked.values()) == [1, 1, 2, 2]


def test_a_diagnosis_repeats_no_query_and_gives_the_same_findings(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=40, slow={2: 1.6}, nan={1: 20}, gradients_every=1)
    with Store.open(run) as store:
        counted = Counted(store)
        told = diagnose(counted, run.manifest())
        assert {"straggler", "non_finite"} <= {finding.kind for finding in told.fired}
        assert [question for question, times in counted.asked.items() if times > 1] == []


def test_short_columns_are_read_once_and_copied_for_each_caller(tmp_path: Path) -> None:
    with Store.open(make_run(tmp_path, ranks=2, steps=20)) as store:
        counted = Counted(store)
        asked = CachedSource(counted)
        for _ in range(2):
            steps = asked.query("SELECT step FROM steps WHERE rank = ? ORDER BY step", [0])["step"]
            assert steps.tolist() == list(range(1, 21))
            steps[:] = 0  # by who asked
            assert len(asked.query("SELECT range AS n FROM range(30000)")["n"]) == 30000
        assert sorted(counted.asked.values()) == [1, 2]


@pytest.mark.parametrize("num_steps", [20, 1200])
def test_a_table_is_asked_once_for_its_nonnull_columns(tmp_path: Path, num_steps: int) -> None:
    """In a long table a column that begins with NULLs is asked for by itself."""
    needed = ["step", "duration_ns", "nonfinite_count", "loss", "compression_error"]
    with Store.open(make_run(tmp_path, ranks=1, steps=num_steps)) as store:
        late = store.session(steps="SELECT * REPLACE (CASE WHEN step > 1100 THEN loss END AS loss) FROM steps")
        lost = ["steps.loss"] * (num_steps < 1100)
        for source in (store, late):
            counted = Counted(source)
            asked = CachedSource(counted)
            assert lacking(asked, steps=needed) == lacking(source, steps=needed)
            assert lacking(asked, steps=["duration_ns"]) == []
            assert [found for found in lacking(asked, steps=needed) if found == "steps.loss"] == (
                lost if source is late else []
            )
            assert sum("COLUMNS" in sql for sql, _ in counted.asked) == 1
            assert max(counted.asked.values()) == 1
            with pytest.raises(StoreError):
                lacking(asked, steps=["no_such_column"])


def test_few_events_are_read_once_and_many_by_their_kinds(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    events = EventWriter(next(run.event_files()), attempt=0, rank=0)
    events.write_any("note", step=3)
    kinds = (("note",), ("rank_started", "note"), ("nothing",))

    def loaded() -> tuple[list[list[Event]], int]:
        with Store.open(run) as store:
            counted = Counted(store)
            asked = CachedSource(counted)
            found = [EventLog.load(asked, of, attempt).all() for of in kinds for attempt in (None, 0, 1)]
            assert found == [EventLog.load(store, of, attempt).all() for of in kinds for attempt in (None, 0, 1)]
            return found, len(counted.asked)

    few, num_questions = loaded()
    assert [len(events) for events in few[:3]] == [1, 1, 0]
    assert num_questions == 1
    for step in range(1000):
        events.write_any("progress", step=step)
    many, num_questions = loaded()
    assert many == few
    assert num_questions == 1 + 9


def test_a_query_of_a_plug_in_that_never_ends_is_ended(tmp_path: Path) -> None:
    with Store.open(make_run(tmp_path, ranks=2, steps=5)) as store:
        endless = "SELECT count(*) FROM range(1000000) a, range(1000000) b"
        with pytest.raises(QueryLimitError):
            answered(CachedSource(CachedSource(store)), "rows", [endless, []], time.monotonic() + 0.5)
        assert store.rows("SELECT count(*) FROM steps") == [(10,)], "the store can be read on"
