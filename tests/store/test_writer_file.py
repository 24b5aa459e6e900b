"""The writer of a store opens its file for each tick, with one DuckDB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest

from store import Ingester
from store.writer_file import WriterFile
from tests.factories import RankWriter, empty_run


def test_ticks_start_one_database_and_leave_the_file_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = empty_run(tmp_path)
    rank = RankWriter(run, 0)
    started: list[Any] = []
    real = duckdb.connect

    def connect(*given: Any, **options: Any) -> duckdb.DuckDBPyConnection:
        started.append(given)
        return real(*given, **options)

    monkeypatch.setattr(duckdb, "connect", connect)
    with Ingester(run) as ingester:
        for number in range(3):
            rank.event("first_update", num_before=number)
            assert ingester.tick().rows["events"] == 1 + (number == 0)
            assert not run.store().with_name(f"{run.store().name}.wal").exists()
            with real(str(run.store())) as other:  # to write, which another open connection would prevent
                assert other.execute("SELECT count(*) FROM events").fetchall() == [(number + 2,)]
    assert len(started) == 1
    rank.close()


@pytest.mark.parametrize("uses", [0, 2])
def test_sql_reaches_no_other_file(tmp_path: Path, uses: int) -> None:
    file = WriterFile(tmp_path / "store.duckdb", threads=1)
    secret, copy = tmp_path / "secret.csv", tmp_path / "copy.csv"
    secret.write_text("a\n1\n")
    for _ in range(uses):
        with file.opened(wait_s=1.0):
            pass
    with file.opened(wait_s=1.0) as connection:
        for sql in (f"FROM '{secret}'", f"COPY (SELECT 1) TO '{copy}'", f"ATTACH '{tmp_path / 'other'}' AS other"):
            with pytest.raises(duckdb.Error):
                connection.execute(sql)
        with pytest.raises(duckdb.Error):
            connection.execute("SET enable_external_access = true")
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.csv", "store.duckdb"]


def test_an_error_leaves_what_was_committed(tmp_path: Path) -> None:
    file = WriterFile(tmp_path / "store.duckdb", threads=1)
    with file.opened(wait_s=1.0) as connection:
        connection.execute("CREATE TABLE numbers AS SELECT 1 AS number")
    with pytest.raises(duckdb.Error), file.opened(wait_s=1.0) as connection:
        connection.execute("BEGIN; INSERT INTO numbers VALUES (2); FROM nothing")
    with file.opened(wait_s=1.0) as connection:
        assert connection.execute("FROM numbers").fetchall() == [(1,)]
    file.close()
