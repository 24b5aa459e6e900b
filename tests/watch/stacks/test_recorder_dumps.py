"""Dumps of the flight recorder through a pipe, from a process that reads it as torch's thread does."""

from __future__ import annotations

import os
import pickle
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
from watch.stacks import recorder_dumps
from watch.stacks.recorder_dumps import STILL_S, take_dumps, wait_for_dumps

WHOLE = pickle.dumps({"version": "2.10", "entries": []})
# What DumpPipe of ProcessGroupNCCL.hpp does, for the rank in argv: polled, answered with a file. It is off its core in
# the middle of writing it, for longer than the watch needs to look at it a few times.
RANK = """
import os, sys, time
rank, whole = sys.argv[1], bytes.fromhex(sys.argv[2])
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
os.mkfifo(pipe, 0o666)
fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
while True:
    try:
        if os.read(fd, 128):
            with open(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + rank, "wb") as file:
                file.write(whole[:20])
                file.flush()
                time.sleep(0.5)
                file.write(whole[20:])
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
    process = subprocess.Popen([sys.executable, "-c", RANK, "3", WHOLE.hex()], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_rank_with_a_pipe_answers(run: RunDir, rank: subprocess.Popen[str]) -> None:
    assert take_dumps(run, 2, [0, 3], wait_s=30) == [3]
    assert dump_path(run, 2, 3).read_bytes() == WHOLE
    dump_path(run, 2, 3).write_bytes(b"of the last time")
    assert take_dumps(run, 2, [3], wait_s=30) == [3]
    assert dump_path(run, 2, 3).read_bytes() == WHOLE


@pytest.mark.parametrize("end", [b"u.", b"uq\x0b.", b"ur\n\x01\x00\x00."], ids=["no memo", "short", "long"])
def test_a_whole_pickle_is_known_by_its_end(end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch puts the dictionary into the memo, under a number of one byte or of four."""
    monkeypatch.setattr(recorder_dumps, "STILL_S", 1000.0)
    (tmp_path / "dump").write_bytes(pickle.dumps({"version": "2.10", "entries": []}, protocol=2)[:-2] + end)
    assert wait_for_dumps({tmp_path / "dump": (0, 0)}, 30) == {tmp_path / "dump"}


def test_what_is_no_pickle_counts_once_it_has_been_still(tmp_path: Path) -> None:
    (tmp_path / "dump").write_bytes(b'{"version": "2.10"')
    start = time.monotonic()
    assert wait_for_dumps({tmp_path / "dump": (0, 0)}, 30) == {tmp_path / "dump"}
    assert time.monotonic() - start >= STILL_S


def test_a_culprit_is_dumped_before_it_is_killed(
    run: RunDir, rank: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dump is written by the rank itself, so a complete one shows that it was alive."""
    monkeypatch.setattr(culprit, "take_dumps", partial(take_dumps, wait_s=30))
    killer = culprit.CulpritKiller(run, EventWriter(run.path / "events.jsonl", rank=-1, attempt=2), may_kill=True)
    killer.act(
        [Verdict(attempt=2, ranks=(3,), summary="Rank 3 hangs.")],
        2,
        {3: RankProcess(pid=rank.pid)},
        {3},
        hang_is_open=True,
    )
    assert rank.wait(100) == -signal.SIGKILL
    assert dump_path(run, 2, 3).read_bytes() == WHOLE


def test_a_dead_rank_does_not_block(run: RunDir, rank: subprocess.Popen[str]) -> None:
    rank.kill()
    rank.wait()
    start = time.monotonic()
    assert take_dumps(run, 2, [3], wait_s=100) == []
    assert time.monotonic() - start < 90, "it is not waited for"


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
