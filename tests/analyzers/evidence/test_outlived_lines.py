"""Lines of schedulers, shells and kernels that the job outlived, or that only look like theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analyzers.evidence.written import diagnosed

STEPS = "".join(f"step {{first}}{number} loss {2 - number / 10:.2f} time 0.5\n" for number in range(1, 5))
RAISED = "".join(
    f"[rank1]: {line}\n"
    for line in (
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 9, in <module>',
        "    step()",
        "ValueError: the batch is empty",
    )
)
OUTLIVED = [
    "WARNING 01-20 09:12:55 scheduler.py:88] Sequence group 9 is preempted by PreemptionMode.SWAP mode because "
    "there is not enough KV cache space.",
    "INFO 01-20 09:12:55 cache.py:12] Evicted 16 blocks",
    "git@example.org: Permission denied (publickey).",
    "ssh: connect to host github.com port 22: Connection timed out",
    "job.sh: line 4: python: command not found",
    "INFO Killed process group of the profiler",
    "The file was not cached. Will ignore this error: [Errno 122] Disk quota exceeded: '/home/u/.cache/x'",
    "/tmp: No space left on device, falling back to /scratch",
    "E tensorflow/stream_executor/cuda/cuda_driver.cc:81] failed to allocate 1.0G: CUDA_ERROR_OUT_OF_MEMORY",
]


@pytest.mark.parametrize("line", OUTLIVED)
def test_the_error_of_the_job_outweighs_lines_that_it_survived(tmp_path: Path, line: str) -> None:
    first = diagnosed(tmp_path, "job.log", STEPS.format(first="") + f"{line}\n" + RAISED).fired[0]
    assert first.cause in ("exception", "out_of_memory")
    went_on = STEPS.format(first="") + f"{line}\n" + STEPS.format(first="1")
    assert diagnosed(tmp_path, "job.log", went_on).fired == ()


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("Warning  Evicted  3m  kubelet  The node was low on resource: memory.", "host_out_of_memory"),
        ("Instance gpu-07 was preempted.", "preempted"),
        ("gpu-02: Permission denied (publickey,password).", "launch_failed"),
        ("gpu-02: bash: line 1: torchrun: command not found", "launch_failed"),
        ("Out of memory: Killed process 4711 (python), UID 0", "host_out_of_memory"),
        ("State: OUT_OF_MEMORY (exit code 0)", "host_out_of_memory"),
        (
            "2026-01-07 10:00:00: E cuda_driver.cc:81] failed to allocate 1.0G: CUDA_ERROR_OUT_OF_MEMORY",
            "out_of_memory",
        ),
    ],
)
def test_the_same_lines_end_a_job_if_nothing_follows(tmp_path: Path, line: str, cause: str) -> None:
    assert diagnosed(tmp_path, "job.log", STEPS.format(first="") + f"{line}\n").fired[0].cause == cause


STALLED = (
    "WARNING: One or more tensors were submitted to be reduced by subset of ranks and are waiting for remainder of "
)
STALLED += (
    "ranks for more than 60 seconds. Stalled ops: grad.a [ready ranks: {first}], grad.b [ready ranks: {second}]\n"
)


@pytest.mark.parametrize(
    ("first", "second", "ranks"),
    [("0, 3, 2", "3, 2, 0", (1,)), ("0", "1, 3", (2,)), ("0, 1", "1, 0", ()), ("1, 0, 2", "0, 2", (1,))],
)
def test_ranks_that_are_ready_for_no_stalled_tensor_are_suspected(
    tmp_path: Path, first: str, second: str, ranks: tuple[int, ...]
) -> None:
    found = diagnosed(tmp_path, "job.log", STALLED.format(first=first, second=second)).fired[0]
    assert (found.cause, found.ranks, found.status) == ("not_entered", ranks, "suspect")


def test_ranks_that_are_ready_for_each_others_missing_tensors_wait_for_each_other(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "job.log", STALLED.format(first="2", second="1, 0")).fired[0]
    assert (found.cause, found.ranks, found.status) == ("mismatch", (), "suspect")
    assert "did not submit: rank 0 not grad.a, rank 2 not grad.b" in found.summary


def test_a_compiler_of_the_device_that_lacks_a_module_is_no_lost_connection(tmp_path: Path) -> None:
    text = "RuntimeError: [ERROR] HCCL error in: torch_npu/distributed/ProcessGroupHCCL.cpp:64\n"
    text += "[ERROR] 2026-01-07-09:12:44 (PID:9, Device:2, RankID:2) ERR02200 DIST call hccl api failed.\n"
    text += "EC0010: Failed to import Python module [ModuleNotFoundError: No module named 'tbe.common'].\n\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("exception", (2,))
    assert "No module named 'tbe.common'" in first.summary


def test_a_message_that_another_ranks_frame_was_written_into_is_read_from_the_next_line(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in <module>\n    main()\n'
    text += "IsADirectoryError:   File \"/job/conf.py\", line 16, in read\n[Errno 21] Is a directory: '/job/conf'\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert "raised IsADirectoryError: [Errno 21] Is a directory: '/job/conf'" in first.summary


def test_a_ray_worker_whose_death_the_job_outlived_is_no_end(tmp_path: Path) -> None:
    died = "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker PID: 77\n"
    steps = "".join(f"(Worker pid=31, ip=10.0.0.2) step {i} loss {1 - i / 100:.3f}\n" for i in range(20))
    assert not diagnosed(tmp_path, "driver.log", steps[:200] + "\n" + died + steps).fired


TIMED_OUT = (
    "[rank1]:[E101 09:00:00.000000000 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=71, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600012 milliseconds "
    "before timing out.\n"
)
RESTARTED = "[INFO] torch.distributed.elastic.agent: [default] Worker group FAILED. {} will restart worker group\n"


def test_a_hang_before_a_restart_after_which_the_job_trained_is_over(tmp_path: Path) -> None:
    log = STEPS.format(first="") + TIMED_OUT + RESTARTED.format("2/3 attempts left;") + STEPS.format(first="")
    assert diagnosed(tmp_path, "job.log", log).fired == ()
    finished = "[INFO] [default] worker group successfully finished. Waiting 300 seconds for other agents to finish.\n"
    assert "job finished" in diagnosed(tmp_path, "job.log", log + finished).verdict
    hung_again = diagnosed(tmp_path, "job.log", log + TIMED_OUT.replace("71", "93")).fired[0]
    assert (hung_again.kind, hung_again.evidence["seq"]) == ("hang", 93)


def test_a_hang_before_a_restart_without_a_step_is_the_end(tmp_path: Path) -> None:
    log = STEPS.format(first="") + TIMED_OUT + RESTARTED.format("2/3 attempts left;")
    assert diagnosed(tmp_path, "job.log", log).fired[0].kind == "hang"


def test_a_retried_request_after_a_survived_connection_error_is_not_a_failure(tmp_path: Path) -> None:
    retried = (
        "WARNING:urllib3.connectionpool:Retrying (Retry(total=2, connect=3)) after connection broken by "
        "'ReadTimeoutError(\"HTTPSConnectionPool(host='track.example.org', port=443): Read timed out.\")': /api/log\n"
    )
    closed = "gpu-1:31:88 [0] include/socket.h:423 NCCL WARN Net : Connection closed by remote peer 10.1.0.4<40112>\n"
    log = STEPS.format(first="") + retried + closed + STEPS.format(first="1")
    assert diagnosed(tmp_path, "job.log", log).fired == ()


def test_a_timeout_after_which_the_job_trained_is_not_its_end(tmp_path: Path) -> None:
    log = STEPS.format(first="") + TIMED_OUT + STEPS.format(first="1")
    assert diagnosed(tmp_path, "job.log", log).fired == ()
    died = "failed (exitcode: -6) local_rank: 1 (pid: 9) of binary: python\n"  # the steps may have been printed late
    assert diagnosed(tmp_path, "job.log", log + died).fired[0].kind == "hang"
