"""A run that has just ended is read when its `watch` has read it, and a run that lives is not waited for."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from probes.tape.attempts import is_closed
from probes.tape.rundir import RunDir
from store import Store, catch_up
from tests.factories import make_run
from tests.forked import ForkedPython

FINAL_POLL_S = 100.0
ROOT = Path(__file__).parents[3]
WATCH = """
import sys
from pathlib import Path
from probes.tape.rundir import RunDir
from store import Ingester
with Ingester(RunDir.open(Path(sys.argv[1])), role="watch") as ingester:
    print("there", flush=True)
    sys.stdin.readline()
    ingester.catch_up()
"""


@contextmanager
def watch_that_has_not_read_yet(run: RunDir) -> Iterator[ForkedPython]:
    """It reads when it is sent a line, and leaves."""
    command = ["-c", WATCH, str(run.path)]
    with ForkedPython(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "there\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for the last word that a busy machine does not reach by itself."""
    monkeypatch.setattr(catch_up, "FINAL_POLL_S", FINAL_POLL_S)


def rows_of_steps(run: RunDir) -> int:
    with Store.open(run) as store:
        return int(store.rows("SELECT count(*) FROM steps")[0][0])


def test_a_reader_waits_for_the_last_records_of_ended_ranks(tmp_path: Path, long_wait: None) -> None:
    run = make_run(tmp_path, ranks=2, steps=30)
    Store.open(run).close()  # a store of what was there before
    late = make_run(tmp_path, ranks=2, steps=30, run=run, attempt=1, first_step=31)
    assert all(is_closed(late.rank_dir(1, rank) / "events.jsonl") for rank in range(2))
    with watch_that_has_not_read_yet(run) as process:
        timer = threading.Timer(0.5, lambda: process.communicate("read\n"))
        timer.start()
        assert rows_of_steps(run) == 120
        timer.join()


@pytest.mark.parametrize("left", ["a rank that was killed", "no rank at all"])
def test_a_run_whose_ranks_may_live_is_read_at_once(tmp_path: Path, long_wait: None, left: str) -> None:
    run = make_run(tmp_path, ranks=2, steps=30)
    Store.open(run).close()
    if left == "a rank that was killed":
        make_run(tmp_path, ranks=2, steps=30, run=run, attempt=1, first_step=31, kill={1: 40})
    else:
        run.rank_dir(1, 0).mkdir(parents=True)
    assert not is_closed(run.rank_dir(1, 1 if left == "a rank that was killed" else 0) / "events.jsonl")
    with watch_that_has_not_read_yet(run):
        start = time.monotonic()
        assert rows_of_steps(run) == 60
        assert time.monotonic() - start < FINAL_POLL_S / 2
