"""States of processes: a debugger stops a rank, a sampler that reads its stack does not."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.factories import make_run
from tests.stand_ins import stand_ins
from tests.waiting import wait_for
from tests.watch.test_standstill_loop import Watched
from watch.processes import ProcessTracker, is_alive, os_state, start_ticks
from watch.standstill_loop import ORPHAN_GRACE_S

_ANY_TRACER = """
import ctypes, sys
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
print("up", flush=True)
sys.stdin.read()
"""
_TRACER = """
import ctypes, os, sys
pid, libc = int(sys.argv[1]), ctypes.CDLL(None)
libc.prctl(15, sys.argv[2].encode(), 0, 0, 0)
libc.ptrace.argtypes = [ctypes.c_long] * 4
assert libc.ptrace(16, pid, 0, 0) == 0
os.waitpid(pid, 0x40000000)
print("holds it", flush=True)
sys.stdin.read()
"""


def _started(*arguments: str) -> subprocess.Popen[bytes]:
    """Start it, and wait for its first line."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", *arguments], stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert process.stdout.readline() != b""
    return process


@pytest.mark.parametrize(("tracer", "expected"), [("gdb", ["stopped"]), ("py-spy", [])])
def test_a_rank_that_a_sampler_reads_is_not_stopped(tracer: str, expected: list[str]) -> None:
    with _started(_ANY_TRACER) as rank:
        with _started(_TRACER, str(rank.pid), tracer) as holder:
            wait_for(lambda: os_state(rank.pid)[0] == "t", "the traced state")
            assert [change.state for change in ProcessTracker().poll({0: rank.pid})] == expected
            holder.communicate(b"")
        rank.communicate(b"")


@contextlib.contextmanager
def _no_descriptor_left() -> Iterator[None]:
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_lack_of_file_descriptors_proves_no_death() -> None:
    pid, tracker = os.getpid(), ProcessTracker()
    ticks, _ = start_ticks(pid), tracker.poll({0: pid})
    with _no_descriptor_left():
        alive, changes = is_alive(pid, ticks), tracker.poll({0: pid})
    assert alive
    assert not changes


def test_a_watch_without_file_descriptors_does_not_leave_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would remove the copies in memory of the ranks that it takes for gone."""
    ranks = stand_ins(tmp_path, 2)
    try:
        where = {rank: {"pid": process.pid} for rank, process in enumerate(ranks)}
        run = make_run(tmp_path, ranks=2, steps=5, hang={1: 5}, identities=where)
        watched = Watched(run, monkeypatch, ranks=ranks)
        watched.loop.tick()
        with _no_descriptor_left():
            needed = [watched.loop.is_needed()]
            watched.advance(ORPHAN_GRACE_S + 1)
            needed.append(watched.loop.is_needed())
        assert needed == [True, True]
    finally:
        for process in ranks:
            process.kill()
            process.wait(100)
