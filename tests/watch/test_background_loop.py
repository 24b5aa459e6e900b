"""The end of a loop in its own thread, and of a process in which one is still in DuckDB."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from watch.background_loop import background_loop

SCRIPT = """
import threading
import duckdb
from watch import background_loop as loops

loops.STOP_S = 0.0
begun = threading.Event()

def query(stop):
    connection = duckdb.connect()
    begun.set()
    while True:
        connection.execute("SELECT sum(hash(range)) FROM range(3000000)").fetchall()

with loops.background_loop(query, name="ingest"):
    begun.wait()
print("told", end="")
loops.end_process(3)
"""


def test_a_thread_that_is_still_in_duckdb_does_not_abort_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "told", "")


def test_a_signal_while_the_thread_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start, has_ended = threading.Thread.start, threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    def run_until(stop: threading.Event) -> None:
        if stop.wait(60):
            has_ended.set()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), background_loop(run_until, name="ingest"):
        pytest.fail("entered")
    assert has_ended.is_set()
