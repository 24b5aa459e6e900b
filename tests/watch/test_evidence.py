"""`rankscope collect-evidence`: one archive of a node, which `analyze` reads as it is."""

from __future__ import annotations

import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.hangs.stacks import Stack
from tests.e2e.launched import rankscope
from tests.waiting import wait_for
from watch import evidence
from watch.stacks.pyspy import StacksError
from watch.stacks.recorder_dumps import ask_for_dump


def test_the_archive_is_read_by_analyze(tmp_path: Path) -> None:
    log = tmp_path / "rank_3.log"
    log.write_text("ValueError: bad sample\n")
    done = rankscope("collect-evidence", "--into", str(tmp_path / "all"), "--log", str(log))
    assert done.returncode == 0, done.stderr
    first = diagnose_files([tmp_path / "all"]).fired[0]
    assert (first.ranks, first.cause) == ((3,), "exception")


def test_what_cannot_be_had_is_named(tmp_path: Path) -> None:
    collected = evidence.collect(tmp_path / "e.tar.gz", logs=[tmp_path / "gone.log"])
    assert "No such file" in collected.missing["logs/gone.log"]
    with tarfile.open(collected.archive) as archive:
        assert any(name.endswith("/collected.txt") for name in archive.getnames())


def test_a_process_whose_stack_cannot_be_taken_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, taken = (
        Stack(pid=1, rank=0, problem="no permission to trace it"),
        Stack(pid=2, rank=1, frames=("a.py:3 f",)),
    )
    monkeypatch.setattr(evidence, "take_threads", {1: (refused, []), 2: (taken, [_thread("f", 3)])}.__getitem__)
    none = evidence.collect(tmp_path / "none.tar.gz", pids=[1])
    assert none.missing["stacks.txt"] == "rank 0: no permission to trace it"
    some = evidence.collect(tmp_path / "some.tar.gz", pids=[1, 2])
    assert "stacks.txt" not in some.missing
    with tarfile.open(some.archive) as archive:
        text = archive.extractfile(next(name for name in archive.getnames() if name.endswith("/stacks.txt")))
        assert text is not None
        lines = text.read().decode().splitlines()
    assert lines[:2] == ["rank 0 (pid 1)", "    no permission to trace it"]
    assert lines[3:5] == ["rank 1 (pid 2)", "    a.py:3 f"]

    def not_installed(pid: int) -> None:
        raise StacksError("py-spy is not installed")

    monkeypatch.setattr(evidence, "take_threads", not_installed)
    without = evidence.collect(tmp_path / "without.tar.gz", pids=[1, 2])
    assert without.missing["stacks.txt"] == "py-spy is not installed"


def _thread(function: str, line: int) -> dict[str, Any]:
    frames = [{"name": name, "filename": f"/job/{file}", "short_filename": file, "line": number}
              for name, file, number in ((function, "a.py", line), ("step", "train.py", 40))]  # fmt: skip
    return {"pid": 1, "thread_name": "MainThread", "frames": frames}


def test_analyze_names_the_rank_whose_stack_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_threads(pid: int) -> tuple[Stack, list[Any]]:
        thread = _thread("load", 7) if pid == 3 else _thread("all_reduce", 2800)
        return Stack(pid=pid, rank=pid - 1, frames=("a.py:1 f",)), [thread | {"pid": pid}]

    monkeypatch.setattr(evidence, "take_threads", take_threads)
    monkeypatch.setattr(evidence, "COMMANDS", {})
    evidence.collect(tmp_path / "evidence-a.tar.gz", pids=range(1, 5))
    evidence.collect(tmp_path / "evidence-b.tar.gz", pids=range(5, 9))
    (hang,) = diagnose_files([tmp_path]).fired
    assert (hang.kind, hang.status, hang.ranks) == ("hang", "suspect", (2,))


def test_what_does_not_fit_is_left_out_and_named(tmp_path: Path) -> None:
    logs = [tmp_path / "small.log", tmp_path / "large.log", tmp_path / "last.log"]
    for path, size in zip(logs, (10, 1 << 20, 20), strict=True):
        path.write_bytes(b"x" * size)
    collected = evidence.collect(tmp_path / "e.tar.gz", logs=logs, pids=[os.getpid()], max_bytes=1 << 20)
    assert collected.missing["logs/large.log"] == "1,048,576 bytes do not fit below the limit of 1,048,576 bytes in all"
    with tarfile.open(collected.archive) as archive:
        sizes = {member.name.partition("/")[2]: member.size for member in archive}
        about = archive.extractfile(next(name for name in archive.getnames() if name.endswith("/collected.txt")))
        assert about is not None
        assert "logs/large.log" in about.read().decode()
    assert (sizes["logs/small.log"], sizes["logs/last.log"]) == (10, 20)
    assert "logs/large.log" not in sizes
    assert sum(sizes.values()) - sizes["collected.txt"] <= 1 << 20


def test_a_rank_is_asked_for_its_dump_through_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe and the file are torch's: a thread stands in for the rank's own."""
    pipe, target = tmp_path / "pipe_3.pipe", tmp_path / "trace_3"
    os.mkfifo(pipe)

    def answer() -> None:
        with pipe.open("rb") as asked:
            asked.readline()
        with target.open("wb") as file:
            threading.Event().wait(0.1)  # torch makes the file, then collects what it writes
            file.write(b"the dump")

    thread = threading.Thread(target=answer)
    thread.start()
    variables = {"RANK": "3", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe_"),
                 "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_")}  # fmt: skip
    monkeypatch.setattr(evidence, "_environment", lambda pid: variables)

    def dumps() -> list[tuple[str, bytes, str]]:
        found = list(evidence._dumps([1]))
        return found if found and not found[0][2] else []  # the thread has not opened its end yet

    found = wait_for(dumps, "the dump")
    thread.join()
    assert found == [("nccl_trace_rank_3", b"the dump", "")]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_only_a_pipe_is_written_into(tmp_path: Path, kind: str) -> None:
    victim, pipe = tmp_path / "victim", tmp_path / "x3.pipe"
    victim.write_text("mine")
    pipe.symlink_to(victim) if kind == "link" else pipe.write_text("mine")
    assert ask_for_dump(pipe)
    assert (victim.read_text(), pipe.read_text()) == ("mine", "mine")


def test_the_archive_is_private_and_its_texts_redacted(tmp_path: Path) -> None:
    log = tmp_path / "\x1b[2Jjob.log"
    log.write_bytes(b"WANDB_API_KEY=0123abcd4567ef89\nValueError: bad \xff sample\n")
    collected = evidence.collect(tmp_path / "e.tar.gz", logs=[log])
    assert collected.archive.stat().st_mode & 0o777 == 0o600
    with tarfile.open(collected.archive) as archive:
        assert all(name.isprintable() for name in archive.getnames())
        (name,) = [name for name in archive.getnames() if "/logs/" in name]
        file = archive.extractfile(name)
        assert file is not None
        assert file.read() == b"WANDB_API_KEY=(redacted)\nValueError: bad \xff sample\n"
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "link.tar.gz").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        evidence.collect(tmp_path / "link.tar.gz")
    assert victim.read_text() == "mine"
