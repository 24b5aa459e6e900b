"""Whom a hang's verdict has killed: the culprits of this node, and others only once a hang has stood for too long."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probes.tape.attempts import start_ticks
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK, RunDir
from probes.tape.stack_file import stack_path
from tests.factories import empty_run
from tests.stand_ins import stand_ins, take_in
from tests.waiting import wait_for
from watch.culprit import OTHERS_S, CulpritKiller, kill_stale
from watch.digests.link import Verdict
from watch.live_tapes import RankProcess

ELSEWHERE = Verdict(attempt=0, ranks=(5,), summary="Rank 5 is stopped.")
FINISHED = Verdict(attempt=0, ranks=(3,), summary="Rank 3 finished while other ranks still wait.")
HUNG = Verdict(attempt=0, ranks=(1,), summary="Rank 1 hangs.")
ROOT = Path(__file__).parents[2]
RANK = """
import sys, threading, time
from pathlib import Path
from probes.tape.rundir import RunDir
from probes.tape.stack_file import register

register(RunDir(Path(sys.argv[1])), 0, 0)
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
time.sleep(300)
"""


class Node:
    """Node with ranks 0 to 3, of which the last has left; processes stand for the others."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = run = empty_run(folder)
        run.node_dir(0).mkdir(parents=True)
        self.events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
        self.killer = CulpritKiller(run, self.events, may_kill=True)
        self.ranks: list[subprocess.Popen[Any]] = [*stand_ins(folder, 3)]
        take_in(run, self.ranks)
        self.others: set[int] = set()
        """Ranks whose number another process has by now."""
        self._monkeypatch = monkeypatch

    @property
    def processes(self) -> dict[int, RankProcess]:
        return {
            rank: RankProcess(pid=process.pid, start_ticks=start_ticks(process.pid) + (rank in self.others))
            for rank, process in enumerate(self.ranks)
            if process.poll() is None
        }

    def act(self, *verdicts: Verdict, hang_is_open: bool = True) -> list[int]:
        """Act once; the ranks that are dead then."""
        self.killer.act(verdicts, 0, self.processes, {0, 1, 2, 3}, hang_is_open=hang_is_open)
        killed = [event["killed_rank"] for event in self.said("culprit_killed")]
        for rank in killed:
            assert self.ranks[rank].wait(100) == -signal.SIGKILL
        assert [rank for rank, process in enumerate(self.ranks) if process.poll() is not None] == killed
        return killed

    def wait(self, seconds: float) -> None:
        now = time.monotonic
        self._monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.events.path)[0] if event["kind"] == kind]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    node = Node(tmp_path, monkeypatch)
    yield node
    for process in node.ranks:
        process.kill()
        process.wait(100)
    node.events.close()


def test_a_culprit_of_this_node_is_killed_alone_and_at_once(node: Node) -> None:
    assert node.act(HUNG) == [1]


@pytest.mark.parametrize("verdict", [FINISHED, ELSEWHERE], ids=["left", "elsewhere"])
def test_ranks_that_wait_for_one_that_does_not_run_here_are_not_killed_before_the_hang_has_stood_long(
    node: Node, verdict: Verdict
) -> None:
    assert node.act(verdict) == []
    assert len(node.said("stacks")) == 1
    node.wait(OTHERS_S / 2)  # and what the acts themselves take, on top: seconds on a busy machine
    assert node.act() == []
    node.wait(OTHERS_S)
    assert node.act() == [0, 1, 2]
    reasons = {event["reason"] for event in node.said("culprit_killed")}
    assert len(reasons) == 1
    assert ("finished" if verdict is FINISHED else "another node") in reasons.pop()


@pytest.mark.parametrize("verdict", [FINISHED, ELSEWHERE], ids=["left", "elsewhere"])
def test_no_rank_is_killed_for_a_hang_that_is_over(node: Node, verdict: Verdict) -> None:
    assert node.act(verdict) == []
    node.wait(OTHERS_S / 2)
    assert node.act(hang_is_open=False) == []
    node.wait(OTHERS_S)
    assert node.act(hang_is_open=False) == []


def test_of_several_culprits_the_one_that_still_runs_is_killed(node: Node) -> None:
    assert node.act(FINISHED, HUNG) == [1]


@pytest.mark.parametrize("verdict", [HUNG, FINISHED], ids=["blamed", "waiting"])
def test_a_process_that_reuses_the_pid_of_a_dead_rank_is_left_alone(node: Node, verdict: Verdict) -> None:
    stack_path(node.run, 0, 1).touch()  # of a rank that would write its stacks when it is signalled
    node.others = {1}
    node.act(verdict)
    node.wait(OTHERS_S + 1)
    node.act()
    assert node.ranks[1].poll() is None


@pytest.mark.parametrize(("verdict", "num_threads"), [(FINISHED, 1), (ELSEWHERE, 1), (HUNG, 2)])
def test_threads_of_a_rank_that_may_go_on_are_not_walked(node: Node, verdict: Verdict, num_threads: int) -> None:
    """`faulthandler` may end a process whose other threads run while it writes their stacks."""
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(node.run.path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    node.ranks[0].kill()
    node.ranks[0].wait(100)
    node.ranks[0] = rank
    assert rank.stdout is not None
    with rank.stdout as output:
        assert output.readline() == "ready\n"
        node.act(verdict)
        path = stack_path(node.run, 0, 0)
        wait_for(lambda: "<module>" in path.read_text(), "the stack of the main thread, which comes last")
        text = path.read_text()
    assert text.count("most recent call first") == num_threads, text


@pytest.mark.parametrize("by", ["culprit", "stale"])
def test_a_copy_of_a_live_run_never_ends_the_ranks_of_the_original(node: Node, tmp_path: Path, by: str) -> None:
    copy = RunDir(Path(shutil.copytree(node.run.path, tmp_path / "copies" / node.run.run_id)))
    events = EventWriter(copy.node_dir(0) / "events.jsonl", attempt=1, rank=NODE_RANK)

    def act(run: RunDir) -> None:
        if by == "culprit":
            CulpritKiller(run, events, may_kill=True).act([HUNG], 0, node.processes, {0, 1, 2, 3}, hang_is_open=True)
        else:
            rank = node.processes[1]
            kill_stale(run, [(0, 1, rank.pid, rank.start_ticks)], events)

    act(copy)
    assert "killed" not in events.path.read_text()
    act(node.run)
    assert node.ranks[1].wait(30) == -signal.SIGKILL
    assert [node.ranks[rank].poll() for rank in (0, 2)] == [None, None]
    events.close()
