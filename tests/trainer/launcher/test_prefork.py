"""Commands that are forked from a process with torch imported: they print, fail, end and are killed like any other."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_for
from trainer.launcher.processes.prefork import PreforkServer
from trainer.launcher.processes.zygote import ZygoteError
from watch.processes import is_alive


@pytest.fixture(scope="module")
def warm() -> Iterator[PreforkServer]:
    server = PreforkServer()
    yield server
    server.close()


def test_output_exit_code_and_folder_are_the_commands_own(warm: PreforkServer, tmp_path: Path) -> None:
    done = warm.start(["version"], cwd=tmp_path)
    assert done.communicate(timeout=100) == (f"rankscope {_version()}\n", None)
    assert (done.poll(), done.returncode) == (0, 0)
    failed = warm.start(["train", "no-such.toml"], cwd=tmp_path)
    output, _ = failed.communicate(timeout=100)
    assert failed.returncode == 2
    assert "no-such.toml" in output
    done.kill()  # of one that has ended: nothing


def test_a_command_is_signalled_by_its_pid_and_ends_with_its_parent(warm: PreforkServer, tmp_path: Path) -> None:
    settings = [f"run.dir={tmp_path / 'runs'}", "train.steps=100000", "model.dim=16", "data.seq_len=16"]
    started = warm.start(["train", *(part for setting in settings for part in ("--set", setting))], cwd=tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        started.wait(timeout=0.01)
    wait_for(lambda: list((tmp_path / "runs").glob("latest/tapes/attempt-0/rank-*")), "a rank")
    assert os.getsid(started.pid) == started.pid, "a session of its own"
    started.send_signal(signal.SIGTERM)
    assert started.wait(timeout=100) == 128 + signal.SIGTERM
    started.stdout.close()
    assert not is_alive(started.pid)


def test_a_parent_that_is_gone_is_one_line() -> None:
    parent = PreforkServer()
    parent.close()
    with pytest.raises(ZygoteError, match="no command can be forked"):
        parent.start(["version"])


def _version() -> str:
    from rankscope import __version__

    return __version__
