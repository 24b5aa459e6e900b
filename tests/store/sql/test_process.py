"""Limits of typed SQL hold whatever a statement does: memory by the kernel, time by a signal, size of the answer."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from probes.tape.rundir import RunDir
from store import StoreError
from store.limited import process as limited_process
from store.sql import process as sql_process
from tests.factories import make_run
from tests.waiting import wait_for

MEMORY_BYTES = 256 << 20
LIMIT_S = 0.4
GREEDY = {
    "cross join": "SELECT len(list(a.range || b.range::VARCHAR)) FROM range(1000000) a, range(1000000) b",
    "series": "SELECT * FROM generate_series(1, 5000000000) ORDER BY random()",
    "one large list": "SELECT range(2000000000)",
    "list aggregate": "SELECT list(range ORDER BY random()) FROM range(200000000)",
    "text aggregate": "SELECT string_agg(repeat('x', 1000), '') FROM range(100000000)",
    "doubling": "WITH RECURSIVE t(s) AS (SELECT 'x' UNION ALL SELECT s || s FROM t) SELECT max(len(s)) FROM t",
    "endless recursion": "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t",
    "distance of texts": "SELECT levenshtein(repeat('a', 200000), repeat('b', 200000))",
}
REGEX = "regexp_replace(repeat('a', 30000000) || range, '(.*)(.*)(.*)x', repeat('\\1\\2', 100), 'g')"
"""Of each row another text: of a constant one DuckDB computes it once, which a quick machine does within the limit."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("sql"), ranks=2, steps=5)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Start with no process; returns the largest resident size of any that was started, in bytes."""
    sql_process._pool.close()
    started: list[int] = []
    largest = [0]
    over = threading.Event()
    begin = sql_process._Child.__init__

    def noted(child: Any) -> None:
        begin(child)
        started.append(child.process.pid)

    def sample() -> None:
        while not over.wait(0.005):
            for pid in list(started):
                largest[0] = max(largest[0], high_water(pid))

    monkeypatch.setattr(sql_process._Child, "__init__", noted)
    thread = threading.Thread(target=sample)
    thread.start()
    yield lambda: largest[0]
    over.set()
    thread.join()
    sql_process._pool.close()


def high_water(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)


def ask(run: RunDir, sql: str, **limits: Any) -> Any:
    return sql_process.ask(run, sql, **({"max_rows": 10, "limit_s": LIMIT_S, "memory_bytes": MEMORY_BYTES} | limits))


def test_no_statement_exceeds_memory_or_time(run: RunDir, peaks: Callable[[], int]) -> None:
    ask(run, "SELECT 1", limit_s=30)
    idle_bytes = peaks()
    for name, statement in GREEDY.items():
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"(?i)memory|longer than|larger than"):
            ask(run, statement)
        # The limit, the start of a process where the one before was ended, and a busy machine.
        assert time.monotonic() - began < LIMIT_S + 60, name
        assert peaks() - idle_bytes < MEMORY_BYTES + (64 << 20), name
    assert ask(run, "SELECT 1", limit_s=30).rows == [(1,)]


def test_a_statement_that_ignores_its_interruption_is_ended(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "MARGIN_S", -sql_process.WAIT_S + 0.5)  # the kernel's own limit is later
    with pytest.raises(StoreError, match=r"longer than 0\.4 s"):
        ask(run, "SELECT count(*) FROM range(20000) a WHERE levenshtein(repeat('a', 100000), repeat('b', 100000)) > 0")
    monkeypatch.undo()
    assert ask(run, "SELECT 1", limit_s=30).rows == [(1,)]


def test_a_regular_expression_takes_no_exponential_time(run: RunDir) -> None:
    """DuckDB's are linear (RE2); a large one is only large."""
    assert ask(run, "SELECT regexp_matches(repeat('a', 100000), '(a*)*(a*)*b')", limit_s=30).rows == [(False,)]
    with pytest.raises(StoreError, match=r"(?i)memory|longer than"):
        ask(run, f"SELECT count(*) FROM range(1000) WHERE len({REGEX}) > range")


def test_one_process_answers_many_questions(run: RunDir) -> None:
    ask(run, "SELECT 1", limit_s=30)
    pids = set()
    for _ in range(5):
        assert sql_process._pool._idle is not None
        pids.add(sql_process._pool._idle.process.pid)
        assert ask(run, "SELECT count(*) FROM steps", limit_s=30).rows == [(10,)]
    assert len(pids) == 1


def test_values_arrive_as_they_are(run: RunDir) -> None:
    values = "1, 2::HUGEINT << 90, 'ü', 1.5::DECIMAL(4, 1), TIMESTAMP '2026-01-02 03:04:05', uuid(), [1, NULL], "
    more = "{'a': 1}, MAP {'k': 2}, INTERVAL 1 DAY, '\\x00'::BLOB, NULL, true, DATE '2026-01-01', TIME '01:02:03'"
    (row,) = ask(run, f"SELECT {values}{more}", limit_s=30).rows
    assert row[:3] == (1, 2 << 90, "ü")
    assert row[6:9] == ([1, None], {"a": 1}, {"k": 2})


def test_a_large_answer_is_refused(run: RunDir) -> None:
    with pytest.raises(StoreError, match="larger than 64 MiB"):
        ask(run, "SELECT repeat('x', 1000000) FROM range(100)", max_rows=100, limit_s=60, memory_bytes=1 << 30)


def test_statements_beyond_the_limit_are_refused_and_all_end(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_process, "MAX_AT_ONCE", 1)
    answers: list[Any] = []

    def slow() -> None:
        try:
            answers.append(ask(run, "SELECT count(*) FROM range(1000000) a, range(1000000) b", limit_s=60))
        except StoreError as error:
            answers.append(error)

    thread = threading.Thread(target=slow)
    thread.start()
    wait_for(lambda: sql_process._pool._working, "first statement")
    with pytest.raises(StoreError, match="try again"):
        ask(run, "SELECT 1")
    (child,) = sql_process._pool._working
    child.process.kill()  # as the kernel does where memory is short
    thread.join(60)
    assert "memory" in str(answers[0])
    assert ask(run, "SELECT 1", limit_s=30).rows == [(1,)]


@pytest.mark.parametrize("blob", [b"", b"\x80\x05]", b"I1x\n.", pickle.dumps([1]), b"cos\nsystem\n."], ids=repr)
def test_a_malformed_answer_is_an_error_of_the_store(blob: bytes) -> None:
    with pytest.raises(StoreError, match="the answer cannot be read"):
        sql_process._loads(blob)
