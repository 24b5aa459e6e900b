"""Lines that state a cause as a fact, and lines that only mention one."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.readers.logs.scan import read_log
from tests.analyzers.evidence.written import diagnosed

STEPS = "".join(f"step {number}/100 loss {3 - number / 50:.3f} time 0.5\n" for number in range(1, 41))
RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in <module>\n    step()\nKeyError: 7\n'

HINTS = [
    'If you see "Too many open files", raise the limit with ulimit -n',
    "Tip: when CUDA out of memory occurs, use a smaller batch",
    "should you run into cudaErrorIllegalAddress, set CUDA_LAUNCH_BLOCKING=1",
    'To avoid "No space left on device" point TMPDIR to a large disk',
    "This may cause Segmentation fault (core dumped) with old drivers",
    'See the FAQ entry "NCCL error: unhandled system error" when the first call fails',
    "checking for known problems: Stale file handle ... no",
    "prompt> how do I fix CUDA out of memory in PyTorch?",
    "note: a pod that is OOMKilled during this test is expected",
    "Number of steps with NaN loss: 0",
    "0 of 64 ranks report uncorrectable ECC error",
    '{"step": 40, "NaN detected": 0, "loss": 2.31}',
    '  on_error: {"CUDA out of memory": "halve_batch", "No space left on device": "stop"}',
    'notify_on = ["OOMKilled", "NodeNotReady", "Evicted"]',
    "handlers registered for: SIGTERM, SIGUSR1, OOMKilled, Evicted, Preempted",
    'config: on_oom: skip, nan_check: true, retry_on: "Connection reset by peer"',
    '        if "CUDA out of memory" in str(error): torch.cuda.empty_cache()',
    '    raise RuntimeError("No space left on device")',
    "# the process was Killed in an earlier version here",
]
WENT_ON = [
    "401 Client Error for https://hub.example.org/m (a cached copy is used)",
    "attempt 2 of 5: HTTPSConnectionPool(host='hub.example.org', port=443): timed out.",
    "Recovered from CUDA out of memory by splitting the batch",
    "skipping sample 88: UnpicklingError: invalid load key, 'x'.",
    "auto batch size: 64 -> CUDA out of memory, trying 32",
]


@pytest.mark.parametrize("line", HINTS)
def test_a_line_that_only_mentions_a_cause_is_not_a_finding(tmp_path: Path, line: str) -> None:
    path = tmp_path / "job.log"
    path.write_text(f"{line}\n")
    assert [event.kind for event in read_log(path).events if event.role not in ("context", "hint")] == []


@pytest.mark.parametrize("line", WENT_ON)
def test_a_line_that_says_that_its_program_goes_on_is_a_warning(tmp_path: Path, line: str) -> None:
    path = tmp_path / "job.log"
    path.write_text(f"{line}\n")
    assert all(event.fields["is_warning"] for event in read_log(path).events if event.role != "context")


@pytest.mark.parametrize("line", [HINTS[1], HINTS[14], WENT_ON[0]])
def test_mentions_and_warnings_neither_hide_the_final_error_nor_give_a_finding(tmp_path: Path, line: str) -> None:
    assert "raised KeyError: 7" in diagnosed(tmp_path, "job.log", f"{STEPS}{line}\n{RAISED}").fired[0].summary
    assert diagnosed(tmp_path, "job.log", f"{line}\n{STEPS}Training finished in 50 s\n").fired == ()


@pytest.mark.parametrize(
    "line",
    [
        "NaN or Inf found in input tensor.",
        "the mirror closed the download: Connection reset by peer",
        "postprocess.sh: line 3: 77 Segmentation fault      (core dumped) ./plot",
    ],
)
def test_a_line_followed_by_more_steps_gives_no_finding(tmp_path: Path, line: str) -> None:
    assert diagnosed(tmp_path, "job.log", f"{line}\n{STEPS}").fired == ()
    assert diagnosed(tmp_path, "job.log", f"{STEPS}{line}\n").fired != ()


def test_a_progress_bar_logged_as_an_error_is_not_an_error(tmp_path: Path) -> None:
    bars = "".join(f"ERROR 2026-01-07T10:00:{at}.1 3/9 2G 0.018 {at}%|#| {at}/60 [00:{at}<00:30, 3.9it/s]\n"
                   for at in range(10, 50))  # fmt: skip
    assert diagnosed(tmp_path, "job.log", bars).fired == ()


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ERROR: bus error in worker. This might be caused by insufficient shared memory (shm).", "shared_memory"),
        ("connection attempt 5/5 failed: HTTPSConnectionPool(host='hub.example.org'): timed out", "download"),
        ("OSError(28, 'No space left on device')", "disk_full"),
        ("Error when saving: [Errno 122] Disk quota exceeded: '/out/x'", "disk_full"),
        ("RuntimeError: CUDA out of memory. If reserved memory is large, try another setting.", "out_of_memory"),
        ("device 0 CUDA out of memory", "out_of_memory"),
        ("RuntimeError: cuda runtime error (2) : out of memory at THCGeneral.cpp:50", "out_of_memory"),
        ("ResourceExhaustedError: failed to allocate memory [Op:AddV2]", "out_of_memory"),
        ("Out of memory: Kill process 4711 (python) score 901 or sacrifice child", "host_out_of_memory"),
        ("=>> PBS: job killed: mem 650kb exceeded limit 600kb", "host_out_of_memory"),
        ('job 9.1 exceeds job hard limit "h_vmem" of queue "gpu.q@n3" (6.0 > limit:5.0)', "host_out_of_memory"),
        ("job 9 exceeded hard wallclock time - initiate terminate method", "time_limit"),
        ("TERM_OWNER: job killed by owner.", "cancelled"),
        ('docker: could not select device driver "" with capabilities: [[gpu]].', "device_setup"),
        ("pthread_create failed: Resource temporarily unavailable", "too_many_processes"),
        ("python: can't open file '/job/train.py': [Errno 2] No such file or directory", "launch_failed"),
        ("Warning  Evicted  2m  kubelet  Pod ephemeral local storage usage exceeds the limit.", "disk_full"),
        ("Batch 40: Invalid loss, terminating training", "unknown"),
    ],
)
def test_a_line_that_states_a_cause_is_a_finding(tmp_path: Path, line: str, cause: str) -> None:
    assert diagnosed(tmp_path, "job.log", f"{STEPS}{line}\n").fired[0].cause == cause


@pytest.mark.parametrize(
    ("message", "cause", "status"),
    [
        ("the reader vanished, possibly due to insufficient shared memory (shm)", "shared_memory", "suspect"),
        ("upload failed. The reason might be: Disk quota exceeded", "disk_full", "suspect"),
        ("upload failed: Disk quota exceeded", "disk_full", "fired"),
        ("could not write the index: No space left on device", "disk_full", "fired"),
        ("bus error in a worker. It might be caused by insufficient shared memory (shm)", "shared_memory", "fired"),
    ],
)
def test_a_cause_that_an_error_only_supposes_is_suspected(
    tmp_path: Path, message: str, cause: str, status: str
) -> None:
    (found,) = diagnosed(tmp_path, "job.log", f"[rank1]: RuntimeError: {message}\n").fired
    assert (found.cause, found.status) == (cause, status)
