"""`rankscope stacks` on processes without Rankscope: which is elsewhere, and which is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from analyzers.hangs.stacks import Stack, group, outlying_stacks
from tests.e2e.launched import rankscope
from tests.rankscope.test_json_schema import checked
from tests.waiting import wait_for
from watch.processes import os_state

SCRIPT = """
import os, sys, time

def wait_for_the_others():
    print("here", flush=True)
    time.sleep(300)

def load_batch():
    print("here", flush=True)
    time.sleep(300)

def train():
    load_batch() if os.environ["RANK"] == "2" else wait_for_the_others()

train()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[subprocess.Popen[str]]]:
    script = tmp_path_factory.mktemp("job") / "script.py"
    script.write_text(SCRIPT)
    started = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**os.environ, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(4)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
    yield started
    for process in started:
        process.kill()
        process.wait(100)


def test_a_process_that_is_elsewhere_or_stopped_is_named(ranks: list[subprocess.Popen[str]]) -> None:
    pids = [str(process.pid) for process in ranks]
    told = rankscope("stacks", *pids)
    if "no right to look" in told.stdout:
        pytest.skip("this machine lets nobody trace")
    assert told.returncode == 0, told.stdout + told.stderr
    assert "Check rank 2 first: its stack differs from the other 3." in told.stdout
    first, second, *_ = told.stdout.split("\n\n")
    assert first.startswith("rank 0 (pid ")
    assert "wait_for_the_others" in first
    assert "load_batch" in second
    assert "odd one out" in second
    checked("stacks", as_json := json.loads(rankscope("stacks", *pids, "--format", "json").stdout))
    assert [one["rank"] for one in as_json["processes"] if one["is_outlier"]] == [2]

    ranks[1].send_signal(signal.SIGSTOP)
    wait_for(lambda: os_state(ranks[1].pid)[0] == "T", "the stop of rank 1")
    told = rankscope("stacks", *pids)
    ranks[1].send_signal(signal.SIGCONT)
    assert "Check rank 1 first: it is stopped (kill -CONT resumes)." in told.stdout, told.stdout


def test_a_process_that_is_gone_is_reported_as_gone() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    told = rankscope("stacks", str(gone.pid))
    assert told.returncode == 2
    assert "no such process" in told.stderr


def test_no_process_is_odd_without_a_majority() -> None:
    def stack(pid: int, frame: str, state: str = "S") -> Stack:
        return Stack(pid=pid, frames=(frame,), os_state=state)

    assert outlying_stacks(group([stack(1, "a"), stack(2, "b")])) == ()
    assert outlying_stacks(group([stack(1, "a"), stack(2, "a")])) == ()
    assert [odd.pid for odd in outlying_stacks(group([stack(1, "a"), stack(2, "b"), stack(3, "a")]))] == [2]
    assert [odd.pid for odd in outlying_stacks(group([stack(1, "a"), stack(2, "a", "T")]))] == [2]
    assert outlying_stacks(group([])) == ()
