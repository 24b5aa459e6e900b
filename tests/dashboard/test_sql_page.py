"""The console is read-only: any other statement is refused, and no file but the store can be reached."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from dashboard.views.sql import EXAMPLES
from probes.tape.rundir import RunDir
from store import Store, StoreError
from tests.dashboard.opened import open_page, shown

REFUSED = [
    "ATTACH '/tmp/other.duckdb'",
    "COPY steps TO '{folder}/stolen.csv'",
    "COPY (SELECT 1) TO '{folder}/stolen.csv'",
    "EXPORT DATABASE '{folder}/stolen'",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/hostname')",
    "SELECT * FROM read_blob('/etc/hostname')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM glob('/*')",
    "SELECT * FROM query('COPY steps TO ''{folder}/stolen.csv''')",
    "EXPLAIN ANALYZE COPY steps TO '{folder}/stolen.csv'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{store}' (FORMAT csv, USE_TMP_FILE false)",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{store}.wal'",
    "/* a */ EXPLAIN /* b */ ANALYZE /* c */ COPY (SELECT 1) TO '{store}.wal'",
    "EXPLAIN (ANALYZE, FORMAT json) COPY (SELECT 1) TO '{store}.wal'",
    "EXPLAIN COPY (SELECT 1) TO '{store}.wal'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "PRAGMA database_list",
    "CALL pragma_version()",
    "CREATE TABLE x AS SELECT 1",
    "DELETE FROM steps",
    "UPDATE steps SET loss = 0",
    "DROP VIEW steps",
    "INSERT INTO steps (step) VALUES (1)",
    "SELECT 1; SELECT 2",
    "SELECT getenv('HOME')",
    "",
    "nonsense",
]


@pytest.mark.parametrize("statement", REFUSED)
def test_what_is_no_reading_of_the_store_is_refused(runs: Path, tmp_path: Path, statement: str) -> None:
    run = RunDir.open(runs / "latest")
    with Store.open(run, memory_bytes=1 << 30) as store:
        before = {path.name: path.read_bytes() for path in run.path.glob("*.duckdb*")}
        with pytest.raises(StoreError):
            store.typed(statement.format(folder=tmp_path, store=run.store(0)))
    assert {path.name: path.read_bytes() for path in run.path.glob("*.duckdb*")} == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "EXPLAIN SELECT count(*) FROM steps",
        "explain analyze FROM steps",
        "EXPLAIN (FORMAT json) SELECT 1",
        "EXPLAIN (SELECT 1)",
        "-- why is it slow?\nEXPLAIN ANALYZE SELECT 1",
    ],
)
def test_a_query_can_be_explained(runs: Path, statement: str) -> None:
    with Store.open(RunDir.open(runs / "latest"), memory_bytes=1 << 30) as store:
        assert store.typed(statement).rows


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_each_example_of_the_page_is_answered(runs: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytz", None)  # nothing that Rankscope needs installs it
    with Store.open(RunDir.open(runs / "latest"), memory_bytes=1 << 30) as store:
        assert store.typed(EXAMPLES[name]).names


def test_a_long_question_is_ended_and_a_large_one_refused(runs: Path) -> None:
    with Store.open(RunDir.open(runs / "latest"), memory_bytes=100 << 20) as store:
        with pytest.raises(StoreError, match=r"took longer than 0\.2 s"):
            store.typed("SELECT count(*) FROM range(1000000) a, range(1000000) b", limit_s=0.2)
        with pytest.raises(StoreError, match=r"(?i)memory"):
            store.typed("SELECT list(range ORDER BY random()) FROM range(200000000)", limit_s=60)
        assert store.typed("SELECT 1").rows == [(1,)]


def test_many_rows_are_cut_and_said_so(runs: Path) -> None:
    with Store.open(RunDir.open(runs / "latest")) as store:
        found = store.typed("FROM range(100)", max_rows=10)
    assert (len(found.rows), found.is_cut, found.names) == (10, True, ("range",))


def test_the_page_answers_and_shows_the_refusal(runs: Path) -> None:
    app = open_page(runs, "sql")
    assert len(app.dataframe[0].value) == 2  # step times of two ranks
    app.text_area(key="sql-text").set_value("COPY steps TO '/tmp/x.csv'")
    app.button(key="sql-ask").click().run()
    assert not app.exception
    assert "COPY is not allowed: this console is read-only" in shown(app)
    app.selectbox(key="sql-example").select("Loss by step").run()
    app.button(key="sql-ask").click().run()
    assert len(app.dataframe[0].value) == 24


BIG = 2**62 + 1
SHOWN = [
    ("SELECT sum(start_ns) AS s FROM steps", {"s": r"\d{20,}"}),
    (f"SELECT {BIG} AS a, NULL::BIGINT AS b, 3 AS c", {"a": str(BIG), "c": "3"}),
    (f"SELECT * FROM (VALUES ({BIG}), (NULL), ({BIG + 1})) AS t(a)", {"a": str(BIG)}),
    ("SELECT * FROM (VALUES (7), (NULL)) AS t(a)", {"a": "7"}),
    ("SELECT -170141183460469231731687303715884105727 AS a", {"a": "-170141183460469231731687303715884105727"}),
    ('SELECT 1 AS a, 2 AS "a (2)", 3 AS a', {"a": "1", "a (2)": "2", "a (3)": "3"}),
    (f"SELECT '{'x' * 90}' || '1', '{'x' * 90}' || '2'", {}),
    ("SELECT true AS a, NULL::BOOLEAN AS b, 'NaN'::DOUBLE AS c, 0.5::FLOAT AS d", {"a": "True", "d": "0.5"}),
    ("SELECT 'Infinity'::DOUBLE AS a, 1.25::DECIMAL(9, 2) AS b, DATE '2026-01-01' AS c", {"b": "1.25"}),
    ("SELECT [1, NULL] AS a, {'x': 1} AS b, MAP {'k': 2} AS c, 'blob'::BLOB AS d, INTERVAL 1 DAY AS e", {}),
    ("SELECT TIMESTAMP '290000-01-01' AS a", {}),
    ("SELECT 1::UNION(n INTEGER, t VARCHAR) AS a UNION ALL SELECT 'x'::UNION(n INTEGER, t VARCHAR)", {}),
    ("SELECT 1 AS a WHERE false", {}),
]


@pytest.mark.parametrize(("statement", "expected"), SHOWN)
def test_any_value_is_shown_exactly_or_refused(runs: Path, statement: str, expected: dict[str, str]) -> None:
    app = open_page(runs, "sql")
    app.text_area(key="sql-text").set_value(statement)
    app.button(key="sql-ask").click().run()
    assert not app.exception, [error.value for error in app.exception]
    if expected:
        table = app.dataframe[0].value
        for name, text in expected.items():
            assert re.fullmatch(text, str(table[name].iloc[0])), table
    app.run()
    assert not app.exception
    app.text_area(key="sql-text").set_value("SELECT 1 AS one")
    app.button(key="sql-ask").click().run()
    assert app.dataframe[0].value["one"].tolist() == [1]
