"""Statements are parsed once a process, and answer whatever connection and values they are asked with."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from store import Store, StoreError
from store.sql import parsed as module
from store.sql.parsed import parsed
from tests.factories import make_run

ASKED = "SELECT n + ? FROM numbers ORDER BY n"


def numbers(*values: int) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:", config={"threads": 1})
    connection.execute("CREATE TABLE numbers (n INTEGER)")
    connection.executemany("INSERT INTO numbers VALUES (?)", [[value] for value in values])
    return connection


def test_one_statement_answers_for_each_connection_and_value() -> None:
    with numbers(1, 2) as one, numbers(7) as other:
        statement = parsed(one, ASKED)
        assert not isinstance(statement, str)
        assert parsed(other, ASKED) is statement
        assert one.execute(statement, [10]).fetchall() == [(11,), (12,)]
        assert other.execute(statement, [20]).fetchall() == [(27,)]
        one.execute("DROP TABLE numbers; CREATE TABLE numbers (n DOUBLE); INSERT INTO numbers VALUES (0.5)")
        assert one.execute(statement, [1]).fetchall() == [(1.5,)], "names are looked up anew"


def test_several_statements_stay_text() -> None:
    with numbers(1) as connection:
        assert parsed(connection, "SELECT 1; SELECT 2") == "SELECT 1; SELECT 2"


def test_no_more_are_kept_than_reports_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_statements", {})
    monkeypatch.setattr(module, "_MAX_STATEMENTS", 3)
    with numbers(1) as connection:
        for number in range(10):
            parsed(connection, f"SELECT {number}")
            assert len(module._statements) <= 3


def test_a_mistake_is_told_each_time(tmp_path: Path) -> None:
    with Store.open(make_run(tmp_path, ranks=1, steps=2)) as store:
        for _ in range(2):
            with pytest.raises(StoreError, match="syntax error"):
                store.rows("SELEC 1")
            with pytest.raises(StoreError, match="no_such_column"):
                store.rows("SELECT no_such_column FROM steps")
