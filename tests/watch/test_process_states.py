"""States of processes: a debugger stops a rank, a sampler that reads its stack does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import wait_for
from watch.processes import ProcessTracker, os_state

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
