"""The phase of a run, from its files and /proc."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from probes.tape.attempts import start_ticks
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from tests.factories import empty_run
from watch.verdicts import run_phase as run_phase_module
from watch.verdicts.run_phase import SETTLE_S, run_phase, settled_phase


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return empty_run(tmp_path)


def rank(run: RunDir, number: int, *, alive: bool = True, host: str = "", closed: bool = False, **launch: Any) -> None:
    """A rank's events; of a rank that is alive the process is this one."""
    folder = run.rank_dir(0, number)
    folder.mkdir(parents=True)
    events = EventWriter(folder / "events.jsonl", attempt=0, rank=number)
    ticks = start_ticks() + (0 if alive else 1)
    events.write("rank", world_size=3, host=host or socket.gethostname(), pid=os.getpid(), start_ticks=ticks)
    if launch:
        events.write("run_started", node_rank=0, **launch)
    if closed:
        events.write("rank_closed", probe_errors={}, dropped_records={})
    events.close()


def node_event(run: RunDir, kind: str, **detail: Any) -> None:
    run.node_dir(0).mkdir(parents=True, exist_ok=True)
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=-1)
    events.write(kind, **detail)
    events.close()


def test_ranks_that_all_live_are_running(run: RunDir) -> None:
    rank(run, 0)
    rank(run, 1)
    assert run_phase(run).word == "running"


def test_a_run_without_ranks_or_of_another_host_is_unknown(run: RunDir) -> None:
    assert run_phase(run).word == "unknown"
    rank(run, 0, host="elsewhere")
    assert run_phase(run).word == "unknown"


def test_one_dead_rank_is_an_ending_until_its_end_is_old(run: RunDir) -> None:
    rank(run, 0)
    rank(run, 1, alive=False)
    phase = run_phase(run)
    assert (phase.word, phase.ended) == ("ending", (1,))
    node_event(run, "rank_exit", exit_rank=1, exit_code=0)
    path = run.node_dir(0) / "events.jsonl"
    assert run_phase(run).word == "ending"
    text = path.read_text()
    path.write_text(re.sub(r'"wall_ns":\d+', '"wall_ns":5', text))  # long ago: the others train on
    assert run_phase(run).word == "running"


def test_all_dead_is_over_once_the_launcher_has_recorded_it(run: RunDir) -> None:
    rank(run, 0, alive=False, launcher_pid=os.getpid())
    rank(run, 1, alive=False)
    assert run_phase(run).word == "ending"
    node_event(run, "run_ended", node_rank=0, reason="failed", exit_code=1)
    assert run_phase(run).word == "ended"


def test_all_dead_is_over_once_the_launcher_is_dead(run: RunDir) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    rank(run, 0, alive=False, launcher_pid=process.pid)
    assert run_phase(run).word == "ended"


def test_all_closed_is_over_wherever_they_ran(run: RunDir) -> None:
    rank(run, 0, closed=True, host="elsewhere", launcher_pid=os.getpid())
    rank(run, 1, closed=True)
    assert run_phase(run).word == "ended"


def test_waiting_for_an_ending_has_a_limit(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    rank(run, 0)
    rank(run, 1, alive=False)
    slept: list[float] = []
    played = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append, time=time.time)
    monkeypatch.setattr(run_phase_module, "time", played)
    assert settled_phase(run).word == "ending"
    assert SETTLE_S <= sum(slept) < SETTLE_S + 1
