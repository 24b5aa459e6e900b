"""Dumps of the flight recorder through a pipe, from a process that reads it as torch's thread does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from probes.tape.dump_pipe import DUMP, PIPE, dump_path, offer_dump_pipe, pipe_path
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from tests.factories import empty_run
from watch import culprit
from watch.digests.link import Verdict
from watch.live_tapes import RankProcess
from watch.stacks.recorder_dumps import take_dumps

# What DumpPipe of ProcessGroupNCCL.hpp does, for the rank in argv: polled, answered with a file.
RANK = """
import os, sys, time
rank = sys.argv[1]
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
os.mkfifo(pipe, 0o666)
fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
while True:
    try:
        if os.read(fd, 128):
            with open(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + rank, "wb") as file:
                file.write(b"half")
                file.flush()
                time.sleep(0.02)
                file.write(b"whole")
    except BlockingIOError:
        pass
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PIPE, DUMP, "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return empty_run(tmp_path)


@pytest.fixture
def rank(run: RunDir) -> Iterator[subprocess.Popen[str]]:
    assert offer_dump_pipe(run, 2)
    process = subprocess.Popen([sys.executable, "-c", RANK, "3"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_rank_with_a_pipe_answers(run: RunDir, rank: subprocess.Popen[str]) -> None:
    assert take_dumps(run, 2, [0, 3], wait_s=30) == [3]
    assert dump_path(run, 2, 3).read_bytes() == b"halfwhole"
    dump_path(run, 2, 3).write_bytes(b"of the last time")
    assert take_dumps(run, 2, [3], wait_s=30) == [3]


def test_a_culprit_is_dumped_before_it_is_killed(
    run: RunDir, rank: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dump is written by the rank itself, so a complete one shows that it was alive."""
    monkeypatch.setattr(culprit, "take_dumps", partial(take_dumps, wait_s=30))
    killer = culprit.CulpritKiller(run, EventWriter(run.path / "events.jsonl", rank=-1, attempt=2), may_kill=True)
    killer.act(
        [Verdict(attempt=2, ranks=(3,), summary="Rank 3 hangs.")], 2, {3: RankProcess(pid=rank.pid)}, {3}, stands=True
    )
    assert rank.wait(30) == -signal.SIGKILL
    assert dump_path(run, 2, 3).read_bytes() == b"halfwhole"


def test_rank_that_is_gone_does_not_block(run: RunDir, rank: subprocess.Popen[str]) -> None:
    rank.kill()
    rank.wait()
    start = time.monotonic()
    assert take_dumps(run, 2, [3], wait_s=30) == []
    assert time.monotonic() - start < 10


def test_only_a_pipe_is_written_to(run: RunDir, tmp_path: Path) -> None:
    assert offer_dump_pipe(run, 0)
    pipe_path(run, 0, 1).write_text("plain")
    pipe_path(run, 0, 2).symlink_to(tmp_path / "elsewhere")
    assert take_dumps(run, 0, [0, 1, 2], wait_s=30) == []
    assert pipe_path(run, 0, 1).read_text() == "plain"
    assert not (tmp_path / "elsewhere").exists()


def test_what_the_user_chose_stays(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DUMP, "/scratch/mine_")
    assert not offer_dump_pipe(run, 0)
    assert PIPE not in os.environ
    assert os.environ[DUMP] == "/scratch/mine_"


def test_no_pipe_where_none_can_be_made(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "mkfifo", refuse)
    assert not offer_dump_pipe(run, 0)
    assert PIPE not in os.environ
