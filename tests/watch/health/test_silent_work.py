"""Work of silent ranks is seen in the processes themselves, children included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK
from tests.waiting import wait_for
from watch.health import silent_work
from watch.health.silent_work import SilentWork, work_of_tree

ROOT = Path(__file__).parents[3]


def test_the_time_of_a_child_counts_while_it_runs_and_once_it_has_ended() -> None:
    program = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'sum(range(4 * 10**7))'])\ninput()"
    parent = subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE)
    try:
        wait_for(lambda: work_of_tree(parent.pid)[0] > 0.1, "the time of the child")
    finally:
        parent.communicate(b"\n")
    assert work_of_tree(parent.pid) == (0.0, 0)


def test_an_orphan_like_watch_is_not_the_work_of_a_rank_that_adopts_it() -> None:
    program = (
        "import os, time\nfrom watch.health.silent_work import work_of_tree\nbefore = work_of_tree(os.getppid())[0]\n"
        "while time.process_time() < 1.0: pass\nprint(work_of_tree(os.getppid())[0] - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, cwd=ROOT)
    assert float(done.stdout) < 0.5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


class Polled:
    """A `SilentWork` of three ranks whose CPU time, bytes read and clock a test sets."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = {11: (0.0, 0), 12: (0.0, 0), 13: (0.0, 0)}
        self.path, self._now_s = path, 0.0
        monkeypatch.setattr(silent_work.time, "monotonic", lambda: self._now_s)
        monkeypatch.setattr(silent_work, "work_of_tree", lambda pid: self.used[pid])
        self._work = SilentWork(EventWriter(path, attempt=0, rank=NODE_RANK), floor_s=5.0)

    def after(self, seconds: float, *, quiet_s: float) -> int:
        """Events so far, after a poll so many seconds after the last one."""
        self._now_s += seconds
        self._work.poll({0: 11, 1: 12, 2: 13}, quiet_s=quiet_s)
        return len(self.events)

    @property
    def events(self) -> list[tuple[list[int], list[int], float]]:
        found = read_events(self.path)[0] if self.path.exists() else []
        return [(event["ranks"], event["idle_ranks"], event["cores"]) for event in found]


def test_silent_ranks_at_work_are_an_event_before_their_silence_is_a_hang(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled = Polled(path, monkeypatch)
    assert polled.after(0, quiet_s=2.6) == 0
    polled.used |= {11: (0.01, 1000), 12: (0.4, 0), 13: (0.0, 5 << 20)}
    assert polled.after(1, quiet_s=3.6) == 1
    assert polled.events == [([1, 2], [], 0.4)], "rank 1 computes, rank 2 reads files, rank 0 waits"


def test_an_event_follows_on_a_change_and_now_and_then(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    polled = Polled(path, monkeypatch)
    polled.after(0, quiet_s=100)
    polled.used |= {12: (5.0, 0)}
    assert polled.after(9, quiet_s=109) == 0, "too short to tell, in such a silence"
    assert polled.after(3, quiet_s=112) == 1
    polled.used |= {12: (10.0, 0)}
    assert polled.after(20, quiet_s=132) == 1, "the same, 20 s later"
    polled.used |= {12: (15.0, 0)}
    assert polled.after(20, quiet_s=152) == 2
    assert polled.after(20, quiet_s=172) == 3
    assert polled.events[-1] == ([], [1], 0.0)
    assert polled.after(40, quiet_s=212) == 3, "no work is nothing new"


def test_nothing_is_read_of_ranks_that_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    polled = Polled(path, monkeypatch)
    polled.after(0, quiet_s=3)
    polled.used |= {12: (5.0, 0)}
    assert polled.after(10, quiet_s=1.0) == 0
    assert polled.after(10, quiet_s=3.0) == 0, "the first look of another silence"


def test_it_reads_this_process() -> None:
    assert work_of_tree(os.getpid())[0] > 0
