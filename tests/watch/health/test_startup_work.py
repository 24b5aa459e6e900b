"""Work before the first step is seen in the processes themselves, children included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK
from tests.waiting import wait_for
from watch.health import startup_work
from watch.health.startup_work import StartupWork, work_of_tree


def test_the_time_of_a_child_counts_while_it_runs_and_once_it_has_ended() -> None:
    program = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'sum(range(4 * 10**7))'])\ninput()"
    parent = subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE)
    try:
        wait_for(lambda: work_of_tree(parent.pid)[0] > 0.1, "the time of the child")
    finally:
        parent.communicate(b"\n")
    assert work_of_tree(parent.pid) == (0.0, 0)


def test_only_silent_ranks_at_work_are_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, used = [0.0], {11: (0.0, 0), 12: (0.0, 0), 13: (0.0, 0)}
    monkeypatch.setattr(startup_work.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(startup_work, "work_of_tree", used.__getitem__)
    path = tmp_path / "events.jsonl"
    work = StartupWork(EventWriter(path, attempt=0, rank=NODE_RANK))
    pids = {0: 11, 1: 12, 2: 13}

    def after(seconds: float, *, quiet_s: float = 60.0, has_stepped: bool = False) -> int:
        now_s[0] += seconds
        work.poll(pids, quiet_s=quiet_s, has_stepped=lambda: has_stepped)
        return len(read_events(path)[0]) if path.exists() else 0

    assert after(0) == 0
    used |= {11: (0.05, 1000), 12: (2.0, 0), 13: (0.0, 50 << 20)}
    assert after(5) == 0, "too short to tell"
    assert after(5) == 1
    (event,) = read_events(path)[0]
    assert (event["ranks"], event["cores"]) == ([1, 2], 0.2), "rank 1 computes, rank 2 reads files, rank 0 waits"
    used |= {12: (9.0, 0)}
    assert after(10) == 1, "at most one in 30 s"
    used |= {12: (12.0, 0)}
    assert after(20) == 2
    used |= {12: (30.0, 0)}
    assert after(40, quiet_s=1.0) == 2, "ranks record"
    assert after(40, has_stepped=True) == 2, "it has started"


def test_it_reads_this_process() -> None:
    assert work_of_tree(os.getpid())[0] > 0
