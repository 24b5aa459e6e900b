"""The parent of a watch without a launcher: it replaces one that died or hangs, and ends with its watch."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from probes.attach.launch import watch_guard, watch_restarts
from probes.attach.launch.watch_guard import BY_ITSELF, MAX_ENDS, guard
from probes.attach.launch.watch_restarts import WatchRestarts
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK, RunDir
from tests.factories import empty_run


class Node:
    """A node of a run, with processes that stand for its watch."""

    def __init__(self, run: RunDir) -> None:
        run.node_dir(0).mkdir(parents=True)
        self.run = run
        self.started: list[subprocess.Popen[bytes]] = []
        self.options: list[list[str]] = []
        self.events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)

    def watch(self, *command: str) -> WatchRestarts:
        def start(heartbeat_fd: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
            self.options.append(list(options))
            self.started.append(subprocess.Popen(command, pass_fds=(heartbeat_fd,)))
            if command[0] != "sleep":
                self.started[-1].wait(100)
            return self.started[-1]

        return WatchRestarts(self.run, 0, self.events, start, final=BY_ITSELF)

    def replaced(self) -> list[dict[str, Any]]:
        return [event for event in read_events(self.events.path)[0] if event["kind"] == "watch_replaced"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(watch_restarts, "RESTART_S", 0.0)
    monkeypatch.setattr(watch_guard, "CHECK_S", 0.0)
    monkeypatch.setattr(watch_restarts, "UNSEEN_S", math.inf)  # clocks that a test sets forward are no suspension
    node = Node(empty_run(tmp_path))
    yield node
    for process in node.started:
        process.kill()
        process.wait(100)
    node.events.close()


def test_a_watch_that_was_killed_is_replaced(node: Node) -> None:
    watch = node.watch("sleep", "300")
    watch.check()
    assert len(node.started) == 1
    watch.process.kill()
    watch.process.wait(100)
    watch.check()
    assert [process.poll() for process in node.started] == [-signal.SIGKILL, None]
    (event,) = node.replaced()
    assert (event["pid"], "exit code -9" in event["reason"]) == (node.started[0].pid, True)


def test_a_watch_that_stands_still_is_killed_and_replaced(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = node.watch("sleep", "300")
    os.kill(watch.process.pid, signal.SIGSTOP)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + watch_restarts.STARTING_S + 1)
    watch.check()
    assert [process.poll() for process in node.started] == [-signal.SIGKILL, None]
    assert "did not answer" in node.replaced()[0]["reason"]


def test_a_watch_that_was_suspended_with_its_parent_is_left_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm suspends all processes of a job, and a virtual machine stands still, for hours."""
    monkeypatch.setattr(watch_restarts, "UNSEEN_S", 5.0)
    watch = node.watch("sleep", "300")
    later_s, now = [3600.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + later_s[0])
    watch.check()
    assert [process.poll() for process in node.started] == [None]
    for _ in range(round(watch_restarts.STARTING_S)):  # it does not answer either while this process runs
        later_s[0] += 2.0
        watch.check()
    assert [process.poll() for process in node.started] == [-signal.SIGKILL, None]


def test_a_watch_that_cannot_be_killed_yet_blocks_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for a disk ends when the disk answers, also after SIGKILL."""
    monkeypatch.setattr(watch_restarts, "KILL_S", 0.05)
    watch = node.watch("sleep", "300")
    now, kill = time.monotonic, watch.process.kill
    monkeypatch.setattr(watch.process, "kill", lambda: None)
    monkeypatch.setattr(time, "monotonic", lambda: now() + watch_restarts.STARTING_S + 1)
    watch.check()
    watch.check()
    assert (len(node.started), node.replaced()) == (1, [])
    kill()
    node.started[0].wait(100)
    watch.check()
    assert [process.poll() for process in node.started] == [-signal.SIGKILL, None]
    assert len(node.replaced()) == 1


@pytest.mark.parametrize(("place", "number"), [("pipe", errno.EMFILE), ("start", errno.EAGAIN)])
def test_a_watch_that_cannot_be_started_now_is_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    """A limit of open files or of processes, which another process may leave in a moment."""
    watch = node.watch("sleep", "300")
    watch.process.kill()
    watch.process.wait(100)

    def refuse(*arguments: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as full:
        if place == "pipe":
            full.setattr(os, "pipe", refuse)
        else:
            full.setattr(watch, "_start_process", refuse)
        watch.check()
        watch.check()
    assert len(node.started) == 1
    watch.check()
    assert [process.poll() for process in node.started] == [-signal.SIGKILL, None]
    assert len(node.replaced()) == 1


@pytest.mark.parametrize("code", BY_ITSELF)
def test_the_guard_ends_with_a_watch_that_ended_by_itself(node: Node, code: int) -> None:
    """The run is over, or another watch of the node holds the store."""
    guard(node.watch("sh", "-c", f"exit {code}"), node.events, node.run)
    assert (len(node.started), node.replaced()) == (1, [])


def test_the_guard_ends_once_the_run_was_deleted(node: Node) -> None:
    watch = node.watch("sh", "-c", "exit 1")
    shutil.rmtree(node.run.path)
    guard(watch, node.events, node.run)
    assert len(node.started) == 1


def test_a_watch_that_always_crashes_is_given_up_and_tried_without_exporters(node: Node) -> None:
    guard(node.watch("false"), node.events, node.run)
    assert len(node.started) == MAX_ENDS + 1
    assert node.options[:4] == [[], [], [], ["--bare"]]
    assert len(node.replaced()) == MAX_ENDS
