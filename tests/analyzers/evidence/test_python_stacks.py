"""Stacks in the form of Python's tracebacks: of pystack, of gdb's py-bt, and of torch_npu next to its dumps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.report.wording.explained import next_step, why
from analyzers.report.wording.stack_texts import stack_texts
from store.readers.programs.python_stacks import read, recognise
from store.readers.programs.registry import program_of
from tests.support.simulator.recorder_dumps import Job

WAITS = (("train.py", 210, "<module>"), ("train.py", 120, "train_step"), ("comm.py", 30, "wait"))
READS = (("train.py", 210, "<module>"), ("train.py", 101, "train_step"), ("data.py", 44, "read_shard"))
"""Outermost first."""
OTHER = (("threading.py", 973, "_bootstrap"), ("threading.py", 320, "wait"))
Frames = tuple[tuple[str, int, str], ...]


def frames(listed: Frames, kind: str = "") -> str:
    return "".join(f'  {kind}File "/w/{file}", line {line}, in {name}\n    {name}()\n' for file, line, name in listed)


def pystack(rank: int, listed: Frames) -> str:
    return (
        f"Traceback for thread {90 + rank} (pt_data_pin) [] (most recent call last):\n{frames(OTHER, '  (Python) ')}\n"
        f"Traceback for thread {40 + rank} (python) [Has the GIL] (most recent call last):\n"
        f'    (C) File "../csu/libc-start.c", line 392, in __libc_start_main (/lib/libc.so.6)\n'
        f"{frames(listed, '  (Python) ')}"
        f'    (C) File "???", line 0, in pthread_cond_wait (/lib/libc.so.6)\n'
    )


def py_bt(rank: int, listed: Frames) -> str:
    inner = frames(listed[::-1])
    return f'Thread 1 (Thread 0x7f2b (LWP {40 + rank}) "python"):\nTraceback (most recent call first):\n{inner}'


def torch_npu(rank: int, listed: Frames) -> str:
    return (
        f"pid: {40 + rank}\nthread <Thread(Thread-1 (run), started daemon 281)>:\n{frames(OTHER)}"
        f"thread <_MainThread(MainThread, started 28147)>:\n{frames(listed)}"
    )


@pytest.mark.parametrize("form", [pystack, py_bt, torch_npu])
def test_the_process_that_stands_elsewhere_is_suspected(tmp_path: Path, form: Callable[[int, Frames], str]) -> None:
    for rank in range(4):
        path = tmp_path / f"stack_rank_{rank}.txt"
        path.write_text(form(rank, READS if rank == 2 else WAITS))
        assert program_of(path.read_bytes()) == "python_stacks"
        (stack,) = read(path).stacks
        assert (stack.rank, stack.pid) == (rank, 40 + rank)
    assert read(tmp_path / "stack_rank_2.txt").stacks[0].frames == (
        "w/data.py:44 read_shard", "w/train.py:101 train_step", "w/train.py:210 <module>",
    )  # fmt: skip
    (hang,) = diagnose_files([tmp_path]).findings
    assert (hang.kind, hang.status, hang.ranks) == ("hang", "suspect", (2,))
    assert "rank 2 in w/data.py:44 read_shard" in hang.summary


def test_stacks_beside_the_dumps_show_where_the_culprit_is(tmp_path: Path) -> None:
    job = Job(4, backend="hccl")
    job.steps(5)
    job.collective("all_reduce", ranks=[0, 1, 3])
    job.write(tmp_path)
    for rank in range(4):
        path = tmp_path / f"nccl_trace_rank_{rank}_py_traceback"
        path.write_text(torch_npu(rank, READS if rank == 2 else WAITS))
    (hang,) = diagnose_files([tmp_path]).fired
    assert (hang.cause, hang.ranks) == ("not_entered", (2,))
    assert hang.evidence["stack_groups"][1]["frames"][0] == "w/data.py:44 read_shard"


def test_a_traceback_of_a_failure_is_read_as_a_log() -> None:
    failure = b'Traceback (most recent call last):\n  File "/w/a.py", line 3, in <module>\nKeyError: 1\n'
    assert not recognise(failure)
    assert not recognise(b"pid: 12\nthread pool started\n")


def test_processes_of_unknown_ranks_are_named_by_their_ids(tmp_path: Path) -> None:
    """All processes of a host in one file, as `for pid in $(pgrep python); do py-spy dump --pid $pid; done` writes."""
    text = ""
    for pid in range(4000, 4004):
        listed = READS if pid == 4002 else WAITS
        shown = "".join(f"    {name} ({file}:{line})\n" for file, line, name in listed[::-1])
        text += f"Process {pid}: python train.py\nPython v3.11.4 (/usr/bin/python3.11)\n\n"
        text += f'Thread {pid} (idle): "MainThread"\n{shown}'
    path = tmp_path / "py-spy-gpu-03.txt"
    path.write_text(text)
    (hang,) = diagnose_files([path]).findings
    assert (hang.status, hang.ranks) == ("suspect", ())
    assert hang.summary.startswith(
        "Most processes wait in comm.py:30 wait (processes 4000, 4001 and 4003), and not process 4002 in data.py:44"
    )
    assert why(hang) == "3 processes waited."
    assert next_step(hang).startswith("Inspect the stack of process 4002 (in data.py:44 read_shard) and the code")
    headings = [heading for heading, _ in stack_texts(hang.evidence)]
    assert headings == [
        "3 processes have the same stack: 4000, 4001 and 4003, innermost first", "process 4002, innermost first",
    ]  # fmt: skip
