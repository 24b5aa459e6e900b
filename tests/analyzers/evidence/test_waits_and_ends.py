"""Waits that came before an end from outside, ranks that wait in several calls, and short timeouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed

STEP = "slurmstepd: error: *** STEP 71.0 ON gpu-1 CANCELLED AT 2026-03-01T10:00:00 ***\n"
LIMIT = "slurmstepd: error: *** JOB 71 ON gpu-1 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***\n"
BY_HAND = "slurmstepd: error: *** JOB 71 ON gpu-1 CANCELLED AT 2026-03-01T10:00:00 ***\n"
SIZE = "All distributed processes registered. Starting with 3 processes\n"


def waited(rank: int, seq: int = 9, op: str = "ALLREDUCE", limit_ms: int = 1800000) -> str:
    return (
        f"[E ProcessGroupNCCL.cpp:475] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=8, NumelOut=8, Timeout(ms)={limit_ms}) ran for {limit_ms + 40} "
        "milliseconds before timing out.\n"
    )


def task(rank: int, how: str = "Exited with exit code 1") -> str:
    return f"srun: error: gpu-1: task {rank}: {how}\n"


@pytest.mark.parametrize("end", [task(1) + task(2) + STEP + task(0, "Terminated"), BY_HAND, LIMIT])
def test_a_job_that_hung_before_it_was_stopped_is_a_hang(tmp_path: Path, end: str) -> None:
    diagnosis = diagnosed(tmp_path, "job.log", SIZE + waited(2) + waited(1) + end)
    first = diagnosis.fired[0]
    assert (first.cause, first.status, first.ranks) == ("not_entered", "suspect", (0,))
    assert ("time limit" in first.summary) == (end == LIMIT)


@pytest.mark.parametrize(
    "fields", ["OpType=ALLREDUCE, SeqNum=9", "OpType=ALLREDUCE, SeqNum=9, NumelIn=8, Timeout(ms)=6000"]
)
def test_a_watchdogs_line_names_its_call_whatever_the_order_of_its_fields(tmp_path: Path, fields: str) -> None:
    begin = "[E ProcessGroupNCCL.cpp:475] [Rank {}] Watchdog caught collective operation timeout: "
    lines = [
        f"{begin.format(rank)}WorkNCCL({fields}) ran for 6040 milliseconds before timing out.\n" for rank in (1, 2)
    ]
    first = diagnosed(tmp_path, "job.log", SIZE + "".join(lines)).fired[0]
    assert (first.kind, first.cause, first.ranks) == ("hang", "not_entered", (0,))
    assert "ALLREDUCE #9" in first.summary


def test_all_ranks_of_a_large_job_that_waited_are_victims(tmp_path: Path) -> None:
    first = diagnosed(tmp_path, "job.log", "".join(waited(rank) for rank in range(100) if rank != 7)).fired[0]
    assert (first.cause, first.ranks) == ("not_entered", (7,))
    assert "Ranks 0-6 and 8-99 failed as a consequence." in first.summary
    assert first.evidence["waiting_ranks"] == [rank for rank in range(100) if rank != 7]


@pytest.mark.parametrize("end", [BY_HAND, LIMIT])
def test_waits_that_end_with_the_job_do_not_explain_it(tmp_path: Path, end: str) -> None:
    causes = [one.cause for one in diagnosed(tmp_path, "job.log", SIZE + end + waited(2) + waited(1)).fired]
    assert causes[0] in ("cancelled", "time_limit")
    steps = "".join(f"step: {n} loss: 2.{n}\n" for n in range(30))  # the job outlived its waits
    first = diagnosed(tmp_path, "job.log", SIZE + waited(2) + waited(1) + steps + end).fired[0]
    assert first.cause in ("cancelled", "time_limit")


def test_a_step_that_srun_ends_after_a_task_was_not_cancelled_by_hand(tmp_path: Path) -> None:
    first = diagnosed(tmp_path, "job.log", task(3, "Segmentation fault") + STEP + task(0, "Terminated")).fired[0]
    assert (first.cause, first.ranks) == ("signal", (3,))
    assert diagnosed(tmp_path, "job.log", STEP + task(3, "Terminated")).fired[0].cause == "cancelled"


def test_distant_sequence_numbers_belong_to_two_groups(tmp_path: Path) -> None:
    (found,) = diagnosed(tmp_path, "job.log", waited(0, 90_012) + waited(5, 41_007) + waited(6, 41_007)).fired
    assert (found.cause, found.ranks, found.evidence["seq"]) == ("all_entered", (), 41_007)
    assert "in another group, rank 0 in ALLREDUCE #90012 waited as well" in found.summary
    (found,) = diagnosed(tmp_path, "job.log", waited(0, 41_012) + waited(1, 41_007) + waited(2, 41_007)).fired
    assert found.cause == "desync"


def test_each_rank_is_said_to_wait_in_its_own_call(tmp_path: Path) -> None:
    text = waited(0, 40) + waited(1, 40) + waited(2, 43) + waited(3, 47)
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert first.cause == "desync"
    for part in ("ranks 0 and 1 in ALLREDUCE #40", "rank 2 in ALLREDUCE #43", "rank 3 in ALLREDUCE #47"):
        assert part in first.summary


def test_no_rank_is_blamed_for_another_call_while_as_many_are_silent(tmp_path: Path) -> None:
    text = waited(1, 88, "ALLTOALL_BASE") + waited(4, 90, "ALLTOALL_BASE") + waited(6, 90, "ALLTOALL_BASE")
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("desync", ())
    assert "ranks 0, 2, 3 and 5 printed nothing" in first.summary
    few = waited(0, 88) + waited(1, 90) + waited(3, 90)
    assert diagnosed(tmp_path, "job.log", few).fired[0].ranks == (0,)


def test_a_timeout_of_milliseconds_is_to_be_raised(tmp_path: Path) -> None:
    first = diagnosed(tmp_path, "job.log", "".join(waited(rank, 1, limit_ms=20) for rank in range(4))).fired[0]
    assert "for 60 ms" in first.summary
    assert next_step(first).startswith("Raise the timeout of the process group, which is 20 ms")
    usual = diagnosed(tmp_path, "job.log", "".join(waited(rank, 1) for rank in range(4))).fired[0]
    assert "Raise the timeout" not in next_step(usual)


def test_a_setup_message_of_nccl_is_not_a_collective_of_the_program(tmp_path: Path) -> None:
    setup = "gpu-2:48:69 [4] bootstrap.cc:77 NCCL WARN Message truncated : received 256 bytes instead of 4\n"
    first = diagnosed(tmp_path, "job.log", setup).fired[0]
    assert (first.cause, first.status) == ("nccl_error", "suspect")
    assert "compare NCCL's version" in next_step(first)


def test_a_checkpoint_error_of_several_ranks_is_not_attributed_to_one(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "/job/save.py", line 4, in <module>\n    save(state)\n'
        "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([2, 6])\n"
        'Traceback (most recent call last): (RANK 2)\n  File "/job/writer.py", line 9, in write\n    os.fsync(fd)\n'
        "OSError: [Errno 5] Input/output error\n"
    )
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("file_system", ())
    assert first.evidence["reported_by_ranks"] == [2, 6]
    assert diagnosed(tmp_path, "job.log", text.replace("2, 6", "2")).fired[0].ranks == (2,)


def test_work_that_the_awaited_rank_still_does_is_quoted(tmp_path: Path) -> None:
    bars = "".join(f"Preparing test set...:  {n}%|####      | {n}/67 [{n:02d}:02<35:12, 58.67s/it]\n" for n in (29, 31))
    verdict = diagnosed(tmp_path, "job.log", SIZE + bars + waited(2) + waited(1)).verdict
    assert "Preparing test set...: 31 of 67" in verdict
    assert "printed nothing" not in verdict


STALLED = (
    "[2026-03-01 10:00:00.1: W horovod/stall_inspector.cc:105] One or more tensors were submitted to be reduced, "
    "gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds.\n"
    "Missing ranks:\n"
)


def test_ranks_that_lack_tensors_of_each_other_are_not_culprits(tmp_path: Path) -> None:
    text = f"{STALLED}0: [broadcast.flag.sz]\n1: [allreduce.a, allreduce.b, allreduce.c ...]\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.status, first.ranks) == ("mismatch", "suspect", ())
    assert "rank 0 not broadcast.flag.sz, rank 1 not allreduce.a" in first.summary
    both = f"{STALLED}2: [allreduce.a, allreduce.b]\n3: [allreduce.a, allreduce.b]\n"
    assert diagnosed(tmp_path, "job.log", both).fired[0].ranks == (2, 3)


STALE = "OSError: [Errno 116] Stale file handle\n"
RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 4, in <module>\n    main()\n'
ENDED = "E0301 10:00:09.1 7 torch/distributed/elastic/multiprocessing/api.py:833] failed (exitcode: 1) local_rank: 2 (pid: 9) of binary: python\n"  # noqa: E501


def test_a_file_system_s_error_of_several_processes_is_not_of_the_one_that_exited(tmp_path: Path) -> None:
    said = "".join(f"gpu-2:{rank} train.util:15 CRITICAL Uncaught {STALE}" for rank in (2, 5))
    assert diagnosed(tmp_path, "job.log", said + RAISED + STALE + ENDED).fired[0].ranks == ()
    one = f"gpu-2:2 train.util:15 CRITICAL Uncaught {STALE}"
    assert diagnosed(tmp_path, "job.log", one + RAISED + STALE + ENDED).fired[0].ranks == (2,)


UNREGISTERED = (
    "(raylet) [2026-03-01 10:00:05,490 E 24 24] worker_pool.cc:586: Some workers of the worker process(26) have "
    "not registered within the timeout. The process is dead, probably it crashed during start.\n"
)


def test_workers_that_never_register_were_not_started(tmp_path: Path) -> None:
    first = diagnosed(tmp_path, "job.log", UNREGISTERED * 3).fired[0]
    assert first.cause == "launch_failed"
    assert "worker-*" in next_step(first)
    steps = "".join(f"step: {n} loss: 2.{n}\n" for n in range(30))
    assert not diagnosed(tmp_path, "job.log", UNREGISTERED + steps).fired
    own = diagnosed(tmp_path, "job.log", UNREGISTERED + RAISED + "KeyError: 'text'\n").fired[0]
    assert own.cause == "exception"


PIPE = (
    '[rank0]: multiprocess.pool.RemoteTraceback: \n[rank0]: """\n[rank0]: Traceback (most recent call last):\n'
    '[rank0]:   File "/v/multiprocess/connection.py", line 399, in _recv\n[rank0]:     raise EOFError\n'
    '[rank0]: EOFError\n[rank0]: """\n[rank0]: \n[rank0]: The above exception was the direct cause of the following '
    'exception:\n[rank0]: \n[rank0]: Traceback (most recent call last):\n[rank0]:   File "/job/train.py", line 23, in '
    "<module>\n[rank0]:     table.map(read)\n[rank0]: EOFError\n"
)


def test_a_thread_limit_explains_a_broken_pipe(tmp_path: Path) -> None:
    thread = (
        "Exception in thread Thread-43 (accepter):\nTraceback (most recent call last):\n"
        '  File "/v/multiprocess/managers.py", line 193, in accepter\n    t.start()\n'
        "RuntimeError: can't start new thread\n"
    )
    first = diagnosed(tmp_path, "job.log", thread + PIPE).fired[0]
    assert (first.cause, first.status, first.ranks) == ("too_many_processes", "fired", (0,))
    other = diagnosed(tmp_path, "job.log", thread + PIPE.replace("EOFError", "KeyError")).fired[0]
    assert other.cause == "exception"
    assert '"""' not in diagnosed(tmp_path, "job.log", PIPE).verdict


def test_a_node_whose_launcher_ended_had_started(tmp_path: Path) -> None:
    ended = (
        "10.9.83.120: [2026-03-01 10:00:29,4] [ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 'a.py', "
        "'--local_rank=7'] exits with return code = -6\n"
    )
    ssh = "pdsh@gpu-1: 10.9.83.120: ssh exited with exit code 250\n"
    first = diagnosed(tmp_path, "job.log", ended + ssh).fired[0]
    assert (first.cause, first.evidence["signal"]) == ("signal", "SIGABRT")
    assert diagnosed(tmp_path, "job.log", ssh).fired[0].cause == "launch_failed"


def test_a_stall_that_passed_is_not_a_hang(tmp_path: Path) -> None:
    steps = "".join(f"Epoch 0 step: {n} loss: 2.{n}\n" for n in range(30))
    assert not diagnosed(tmp_path, "job.log", f"{STALLED}0: [allreduce.a]\n{steps}").fired
    assert diagnosed(tmp_path, "job.log", f"{steps}{STALLED}0: [allreduce.a]\n").fired


def test_a_ray_worker_that_is_ended_after_the_training_is_no_failure(tmp_path: Path) -> None:
    steps = "".join(f"(TaskRunner pid=8) step:{n} - actor/pg_loss:0.{59 - n}\n" for n in range(30))
    done = "(TaskRunner pid=8) (\"Final validation metrics: {'val/reward': 0.71}\")\n"
    died = (
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker IP address: "
        "10.9.47.9 Worker port: 3819 Worker PID: 8702 Worker exit type: SYSTEM_ERROR Worker exit detail: Worker exits "
        "unexpectedly by a signal. SystemExit is raised (sys.exit is called). Exit code: 1. {}\n"
    )
    by_ray = died.format("The process receives a SIGTERM.")
    assert not diagnosed(tmp_path, "job.log", steps + done + by_ray).fired
    assert diagnosed(tmp_path, "job.log", steps + by_ray).fired
    assert diagnosed(tmp_path, "job.log", steps + done + died.format("End of file.")).fired


WAIT = (
    "ERROR:root:[/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 60000ms for recv operation to complete\n"
)
IDLE = "".join(f"[2026-03-01 10:00:{n},255] [INFO] [queue.py:20] No work for now\n" for n in range(10, 30, 5))
STEPS = "".join(f"step: {n} loss: 2.{n}\n" for n in range(20))


def waits_beside(folder: Path, name: str, text: str) -> tuple[str, str, tuple[int, ...]]:
    (folder / "trainer-1.log").write_text(STEPS + WAIT)
    (folder / name).write_text(text)
    first = diagnose_files([folder]).fired[0]
    return first.cause, first.status, first.ranks


def test_an_idle_polling_process_is_suspected_of_being_awaited(tmp_path: Path) -> None:
    assert waits_beside(tmp_path, "trainer-0.log", STEPS + IDLE) == ("not_entered", "suspect", ())
    first = diagnose_files([tmp_path]).fired[0]
    assert 'trainer-0.log reports no wait and ends with "[INFO] [queue.py:20] No work for now"' in first.summary
    assert "trainer-0.log" in next_step(first)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trainer-0.log", IDLE + STEPS),  # it trains
        ("trainer-0.log", STEPS + IDLE + WAIT),  # it waits, too
        ("trainer-0.log", STEPS + IDLE + "saving\n"),
        ("monitor.log", IDLE),  # another kind of process
    ],
)
def test_a_process_that_may_not_be_awaited_is_not_named(tmp_path: Path, name: str, text: str) -> None:
    assert waits_beside(tmp_path, name, text)[0] == "all_entered"


@pytest.mark.parametrize("is_one_file", [True, False])
def test_a_wait_after_the_end_of_a_training_may_be_for_the_rank_that_saves(tmp_path: Path, is_one_file: bool) -> None:
    end, waits = "Training finished.\nSaving the final model to ./out\n", [waited(rank) for rank in (1, 2, 3)]
    if is_one_file:
        (tmp_path / "job.log").write_text("".join([end, *waits]))
    else:
        for rank, text in enumerate([end, *waits]):
            (tmp_path / f"rank_{rank}.log").write_text(text)
    (found,) = diagnose_files([tmp_path]).fired
    assert (found.cause, found.status, found.ranks) == ("not_entered", "suspect", (0,))
    said = "Training had finished before that" if is_one_file else "Its own log says that the training finished"
    assert said in found.summary
    assert "saves, merges or uploads the model" in next_step(found)


RERUN = "RuntimeError: Rank 5, node n-3, device 5, iteration 4711: Unexpected result nan (message='in the local loss')"
WAITED = "[rank{rank}]:[E301 08:40:00.1 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n"  # noqa: E501


@pytest.mark.parametrize(
    ("consequence", "victims"),
    [
        (
            "".join(WAITED.format(rank=rank, seq=9, op="ALLREDUCE") for rank in (0, 1, 2, 3, 4, 6, 7)),
            "Ranks 0-4, 6 and 7",
        ),
        ("slurmstepd: error: *** STEP 41.0 ON n-1 CANCELLED AT 2026-03-01T08:31:00 ***\n", ""),
    ],
)
def test_a_rank_that_stopped_at_a_nan_is_the_cause_of_what_follows(
    tmp_path: Path, consequence: str, victims: str
) -> None:
    found = diagnosed(tmp_path, "job.log", f"[rank5]: {RERUN}\n{consequence}").fired[0]
    assert (found.kind, found.ranks, found.first_step) == ("non_finite", (5,), 4711)
    assert (f"{victims} failed as a consequence" in found.summary) == bool(victims)


def test_a_nan_that_only_a_log_line_reports_does_not_explain_a_hang(tmp_path: Path) -> None:
    waited = "".join(WAITED.format(rank=rank, seq=9, op="ALLREDUCE") for rank in range(4))
    assert diagnosed(tmp_path, "job.log", f"[rank1]: found NaN in local batch 7\n{waited}").fired[0].kind == "hang"


@pytest.mark.parametrize(("seqs", "ranks"), [((7, 9, 9, 9), (0,)), ((7, 8, 9, 10), ()), ((7, 9, 9, 7), ())])
def test_a_rank_behind_is_suspected_only_if_most_ranks_wait_in_one_call(
    tmp_path: Path, seqs: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    text = "".join(WAITED.format(rank=rank, seq=seq, op="ALLREDUCE") for rank, seq in enumerate(seqs))
    found = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (found.cause, found.ranks) == ("desync", ranks)
    assert "of one group" not in found.summary  # no line names the group


@pytest.mark.parametrize(("clock", "is_told"), [("08:29:52", True), ("08:12:00", False)])
@pytest.mark.parametrize(
    "event",
    [
        "[2026-03-01 {}] gpu-3:41:77 [2] transport/net_ib.cc:253 NCCL WARN NET/IB : mlx5_1:1 Got non-fatal async event: port error(10)",  # noqa: E501
        "Mar  1 {} gpu-3 kernel: mlx5_core 0000:5e:00.0 ib1: Link is Down",
    ],
)
def test_an_event_of_the_network_is_told_if_the_wait_began_then(
    tmp_path: Path, event: str, clock: str, is_told: bool
) -> None:
    waited = "".join(WAITED.format(rank=rank, seq=9, op="ALLREDUCE") for rank in range(4))
    first = "[2026-03-01 08:10:00] step 8 loss 2.0 time 0.5\n"
    found = diagnosed(tmp_path, "job.log", f"{first}{event.format(clock)}\n{waited}").fired[0]
    assert found.kind == "hang"
    assert ("When this wait began, gpu-3 reported" in found.summary) == is_told


AGENT = """Traceback (most recent call last):
  File "/v/torch/distributed/run.py", line 870, in run
    elastic_launch(
  File "/v/torch/distributed/elastic/agent/server/api.py", line {line}, in {call}
    wait(store)
  File "/v/torch/distributed/elastic/utils/store.py", line 31, in get_all
    data = store.get(key)
{error}
"""


@pytest.mark.parametrize(
    "error", ["torch.distributed.DistStoreError: Socket Timeout", "RuntimeError: wait timeout after 900000ms"]
)
def test_launchers_that_wait_for_other_nodes_have_lost_no_rank(tmp_path: Path, error: str) -> None:
    (tmp_path / "node1.log").write_text(AGENT.format(line=551, call="_rendezvous", error=error), encoding="utf-8")
    text = AGENT.format(line=551, call="_rendezvous", error=error)
    diagnosed(tmp_path, "node0.log", text)
    first = diagnose_files([tmp_path]).fired[0]
    assert (first.cause, first.status, first.ranks) == ("rendezvous", "suspect", ())
    assert "waited for the launchers of the other nodes" in first.summary
    assert "--node-rank" in next_step(first)


@pytest.mark.parametrize(
    ("call", "error"),
    [("_exit_barrier", "torch.distributed.DistStoreError: Socket Timeout"),
     ("_rendezvous", "torch.distributed.DistNetworkError: Connection reset by peer")],
)  # fmt: skip
def test_launchers_that_lost_a_connection_lack_no_node(tmp_path: Path, call: str, error: str) -> None:
    first = diagnosed(tmp_path, "node0.log", AGENT.format(line=551, call=call, error=error)).fired[0]
    assert "waited for the launchers of the other nodes" not in first.summary
