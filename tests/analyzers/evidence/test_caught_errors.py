"""Errors that did not end their process: raised while it was exiting, or caught by the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analyzers.evidence.written import diagnosed

LIB = "/opt/py/lib/python3.11"
UNCAUGHT = ("/job/fit.py", 70, "<module>")
RAISING = "/job/client.py"
IN_READER = ("/job/reader.py", 12, "fetch")
STEP = "0: step {n} loss 2.{n:03d} time 0.5\n"
STEPS = "".join(STEP.format(n=n) for n in range(40, 50))
ENDED = "E0301 02:07:08.1 71 torch/distributed/elastic/multiprocessing/api.py:833] failed (exitcode: 1) local_rank: 3 (pid: 9) of binary: python\n"  # noqa: E501


def raised(rank: int, error: str, *frames: tuple[str, int, str]) -> str:
    prefix = f"[rank{rank}]: "
    code = "raise found" if frames[-1][0] == RAISING else "run()"
    lines = (f'{prefix}  File "{path}", line {line}, in {name}\n{prefix}    {code}\n' for path, line, name in frames)
    return f"{prefix}Traceback (most recent call last):\n{''.join(lines)}{prefix}{error}\n"


@pytest.mark.parametrize(
    "handler",
    [
        (f"{LIB}/multiprocessing/util.py", 300, "_run_finalizers"),
        (f"{LIB}/multiprocessing/util.py", 334, "_exit_function"),
        (f"{LIB}/weakref.py", 666, "_exitfunc"),
        (f"{LIB}/concurrent/futures/thread.py", 31, "_python_exit"),
        (f"{LIB}/threading.py", 1583, "_shutdown"),
    ],
)
def test_an_error_in_an_exit_handler_gives_way_to_one_that_ended_a_process(
    tmp_path: Path, handler: tuple[str, int, str]
) -> None:
    at_exit = raised(6, "OSError: [Errno 39] Directory not empty: '/tmp/w6'", handler, (f"{LIB}/shutil.py", 9, "rm"))
    at_exit += "[rank6]: OSError: [Errno 39] Directory not empty: '/tmp/w6'\n"
    root = raised(2, "ValueError: the record has no label", UNCAUGHT, IN_READER)
    (found,) = diagnosed(tmp_path, "job.log", STEPS + at_exit + root).fired
    assert (found.cause, found.ranks, found.evidence["error_type"]) == ("exception", (2,), "ValueError")
    (alone,) = diagnosed(tmp_path, "alone.log", STEPS + at_exit).fired
    assert (alone.ranks, alone.status) == ((6,), "suspect")


def test_an_error_that_atexit_prints_ends_no_process(tmp_path: Path) -> None:
    at_exit = "Error in atexit._run_exitfuncs:\n" + raised(6, "RuntimeError: closed", ("/job/track.py", 5, "flush"))
    root = raised(2, "ValueError: the record has no label", UNCAUGHT, IN_READER)
    (found,) = diagnosed(tmp_path, "job.log", STEPS + at_exit + root).fired
    assert found.ranks == (2,)


@pytest.mark.parametrize("end", ["", ENDED])
@pytest.mark.parametrize("caught", ["[rank1]: OSError: short read\n", raised(1, "OSError: short read", IN_READER)])
def test_an_error_before_a_later_step_gives_way_to_an_uncaught_one(tmp_path: Path, caught: str, end: str) -> None:
    root = raised(3, "KeyError: 'tokens'", UNCAUGHT, IN_READER)
    found = diagnosed(tmp_path, "job.log", STEPS + caught + STEP.format(n=50) + root + end).fired[0]
    assert (found.ranks, found.evidence["error_type"], found.status) == ((3,), "KeyError", "fired")


@pytest.mark.parametrize(
    ("frames", "status"), [((IN_READER,), "suspect"), ((UNCAUGHT, IN_READER), "fired")]
)  # a step printed late may follow an uncaught error
def test_an_error_before_the_last_step_is_proven_only_if_it_left_the_main_module(
    tmp_path: Path, frames: tuple[tuple[str, int, str], ...], status: str
) -> None:
    text = STEPS + raised(1, "OSError: short read", *frames) + STEP.format(n=50)
    (found,) = diagnosed(tmp_path, "job.log", text).fired
    assert (found.ranks, found.status) == ((1,), status)


def test_an_error_while_memory_ran_out_is_not_said_to_precede_it(tmp_path: Path) -> None:
    first = raised(1, "torch.OutOfMemoryError: CUDA out of memory.", UNCAUGHT)
    between = "[rank1]: \n[rank1]: During handling of the above exception, another exception occurred:\n[rank1]: \n"
    text = STEPS + first + between + raised(1, "AttributeError: no attribute 'close'", UNCAUGHT)
    found = diagnosed(tmp_path, "job.log", text).fired[0]
    assert found.cause == "out_of_memory"
    assert "AttributeError" not in found.summary


@pytest.mark.parametrize(
    "stop",
    [
        "slurmstepd: error: *** STEP 41.0 ON n-1 CANCELLED AT 2026-03-01T08:31:00 ***\n",
        "W0301 08:31:00.1 71 torch/distributed/elastic/agent/server/api.py:704] Received 15 death signal, shutting "
        "down workers\n",
    ],
)
def test_an_error_of_a_process_that_was_being_ended_is_a_consequence(tmp_path: Path, stop: str) -> None:
    error = raised(2, "RuntimeError: the writer is closed", UNCAUGHT, ("/job/save.py", 3, "save"))
    assert diagnosed(tmp_path, "job.log", STEPS + stop + error).fired[0].cause == "cancelled"
    assert diagnosed(tmp_path, "job.log", STEPS + error + stop).fired[0].cause == "exception"
    next_job = STEPS + stop + STEPS + error
    assert diagnosed(tmp_path, "job.log", next_job).fired[0].cause == "exception"


@pytest.mark.parametrize(
    ("error", "file", "cause"),
    [
        ("TimeoutError: the catalogue gave no answer: timed out after 60 s", RAISING, "exception"),
        ("TimeoutError: timed out waiting for rank 0 to build the index", RAISING, "connection_lost"),
        ("TimeoutError: the catalogue gave no answer: timed out after 60 s", "/job/fit.py", "connection_lost"),
    ],
)
def test_a_timeout_that_the_program_raises_itself_is_its_own_error(
    tmp_path: Path, error: str, file: str, cause: str
) -> None:
    (found,) = diagnosed(tmp_path, "job.log", STEPS + raised(3, error, UNCAUGHT, (file, 8, "ask"))).fired
    assert found.cause == cause


def test_a_worker_without_its_parents_locks_is_a_consequence(tmp_path: Path) -> None:
    frames = (f"{LIB}/multiprocessing/spawn.py", 120, "main"), (f"{LIB}/multiprocessing/synchronize.py", 110, "load")
    worker = raised(6, "FileNotFoundError: [Errno 2] No such file or directory", *frames)
    root = raised(1, "ValueError: the record has no label", UNCAUGHT, IN_READER)
    assert diagnosed(tmp_path, "job.log", STEPS + worker + root).fired[0].ranks == (1,)


IGNORED = f"""Exception ignored in: <function _LoaderIter.__del__ at 0x7f2a>
Traceback (most recent call last):
  File "{LIB}/site-packages/torch/utils/data/dataloader.py", line 1101, in __del__
    self._shutdown_workers()
  File "{LIB}/multiprocessing/process.py", line 149, in join
    assert self._parent_pid == os.getpid(), 'can only join a child process'
AssertionError: can only join a child process
"""


@pytest.mark.parametrize("times", [1, 3])
def test_errors_in_a_destructor_between_steps_raise_no_alarm(tmp_path: Path, times: int) -> None:
    few = "".join(STEP.format(n=n) for n in range(50, 54))
    found = diagnosed(tmp_path, "job.log", STEPS + IGNORED * times + few + IGNORED * times + STEP.format(n=54))
    assert not found.fired
    assert found.verdict.startswith("The log ends in training")
