"""A zygote that answers too late: the rank that it forks then never runs, because another has taken its place."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_for
from trainer.launcher.processes import zygote as module
from trainer.launcher.processes.zygote import Zygote, ZygoteError

_SERVER = """
import socket, sys
from trainer.launcher.processes import zygote
zygote.import_trainer, zygote.unsafe_to_fork, zygote.ENTRY_POINT = (lambda: None), (lambda: ""), "platform:node"
zygote._serve(socket.socket(fileno=int(sys.argv[1])))
"""


def _started(theirs: object, log: int) -> subprocess.Popen[bytes]:
    number = str(theirs.fileno())  # type: ignore[attr-defined]
    return subprocess.Popen([sys.executable, "-c", _SERVER, number], stderr=log, pass_fds=[int(number)])


@pytest.fixture
def zygote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygote]:
    """A zygote whose ranks return at once; it has not imported torch."""
    monkeypatch.setattr(module, "_interpreter", _started)
    monkeypatch.setattr(module, "_num_threads", lambda: 2)
    with contextlib.closing(Zygote(tmp_path / "log")) as started:
        yield started
    ctypes.CDLL(None).prctl(module._PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _forked(zygote: Zygote, folder: Path) -> int:
    return zygote.fork(arguments=[], environment={}, stdout=folder / "out", stderr=folder / "err")


def test_a_rank_that_is_forked_too_late_ends_at_once(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.waitpid(_forked(zygote, tmp_path), 0)
    assert (tmp_path / "out").exists()  # a rank's first act
    late = tmp_path / "late"
    late.mkdir()
    monkeypatch.setattr(module, "FORK_TIMEOUT_S", 0.01)
    os.kill(zygote._pid, signal.SIGSTOP)
    stat = Path(f"/proc/{zygote._pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "a stopped zygote")
    with pytest.raises(ZygoteError, match="timed out"):
        _forked(zygote, late)
    os.kill(zygote._pid, signal.SIGCONT)
    zygote._channel.settimeout(120.0)
    pid = int(zygote._channel.recv(100).split(b":")[1].rstrip(b"}"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not [*late.iterdir()]
