"""A rank ends with its launcher, also one that was forked by a process in between."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for
from watch.processes import is_alive

LAUNCHER = """
import ctypes, os, sys, time
from probes.attach.launch.parent_death import VARIABLE, end_with_launcher

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # the reaper of its descendants, as the trainer's launcher is
os.environ[VARIABLE] = str(os.getpid())
os.environ["GROUP_WORLD_SIZE"] = sys.argv[2]

def rank():
    assert end_with_launcher() and VARIABLE not in os.environ
    print(os.getpid(), flush=True)
    time.sleep(300)

if os.fork() == 0:
    if sys.argv[1] == "zygote":
        zygote = os.getpid()
        if os.fork() == 0:
            while os.getppid() == zygote:
                time.sleep(0.001)
            rank()
        os._exit(0)
    rank()
time.sleep(300)
"""


def _started(how: str, nodes: int) -> tuple[subprocess.Popen[str], int]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, how, str(nodes)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert launcher.stdout is not None
    return launcher, int(launcher.stdout.readline())


@pytest.mark.parametrize(("how", "nodes"), [("child", 1), ("zygote", 1), ("child", 2)])
def test_it_ends_when_the_launcher_is_killed(how: str, nodes: int) -> None:
    launcher, rank = _started(how, nodes)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(100)
    wait_for(lambda: not is_alive(rank), "the end of the rank")
