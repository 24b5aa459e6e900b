"""What proves that a rank is to blame, and what does not: each principle on logs that no incident holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.test_logs import diagnose, watchdog

OWN = '{label}Traceback (most recent call last):\n{label}  File "/job/{file}.py", line 7, in step\n{label}{error}\n'
TORCHRUN = "E0301 02:07:08.1 71 torch/distributed/elastic/multiprocessing/api.py:833] failed (exitcode: {code}) local_rank: {local} (pid: 71) of binary: python\n"  # noqa: E501
TABLE = """\
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-01_08:30:{second:02}
  host      : {host}
  rank      : {rank} (local_rank: {local})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def raised(label: str, error: str = "KeyError: 'label'", file: str = "train") -> str:
    return OWN.format(label=label, error=error, file=file)


def steps(first: int, last: int) -> str:
    return "".join(f"step: {step} loss: 2.5\n" for step in range(first, last))


def test_a_library_error_raised_in_a_collective_proves_nothing(tmp_path: Path) -> None:
    library = raised("[rank1]: ", "RuntimeError: oneccl: comm failed, status 7", "x/torch/distributed/distributed_c10d")
    (found,) = diagnose(tmp_path, job=library).fired
    assert (found.status, found.ranks, found.cause) == ("suspect", (), "connection_lost")


def test_an_argument_error_raised_in_a_collective_is_proof(tmp_path: Path) -> None:
    own = raised("[rank1]: ", "ValueError: Invalid scalar type", "x/torch/distributed/distributed_c10d")
    (found,) = diagnose(tmp_path, job=own).fired
    assert (found.status, found.ranks, found.cause) == ("fired", (1,), "exception")


def test_a_message_about_another_rank_accuses_none(tmp_path: Path) -> None:
    text = raised("[rank1]: ", "RuntimeError: step aborted because another rank failed")
    (found,) = diagnose(tmp_path, job=text).fired
    assert (found.status, found.ranks) == ("suspect", ())


def test_an_error_that_the_job_survived_did_not_end_it(tmp_path: Path) -> None:
    handled = raised("[rank1]: ") + steps(0, 40)
    first = diagnose(tmp_path, job=handled + raised("[rank3]: ", "IndexError: 9")).fired[0]
    assert (first.status, first.ranks) == ("fired", (3,))
    assert "IndexError" in first.summary


def test_a_job_that_only_survived_errors_has_no_culprit(tmp_path: Path) -> None:
    assert diagnose(tmp_path, job=raised("[rank1]: ") + steps(0, 40)).fired == ()


def test_errors_while_the_launcher_ends_the_job_are_consequences(tmp_path: Path) -> None:
    text = TABLE.format(second=1, host="a", rank=2, local=2, code=-9, pid=72)
    ending = "W0301 08:30:02.1 71 api.py:851] Sending process 73 closing signal SIGTERM\n"
    worker = raised("[rank0]: ", "RuntimeError: DataLoader worker (pid 9) is killed by signal: Terminated.")
    first = diagnose(tmp_path, job=ending + worker + text).fired[0]
    assert (first.ranks, first.cause) == ((2,), "signal")


@pytest.mark.parametrize("mark", ["Exception in thread Thread-5:", "Exception ignored in: <function f at 0x7f>"])
def test_an_error_of_a_thread_ends_no_process(tmp_path: Path, mark: str) -> None:
    text = f"[rank2]: {mark}\n" + raised("[rank2]: ") + raised("[rank1]: ", "IndexError: 9")
    first = diagnose(tmp_path, job=text).fired[0]
    assert (first.status, first.ranks) == ("fired", (1,))
    alone = diagnose(tmp_path, job=f"[rank2]: {mark}\n" + raised("[rank2]: ")).fired
    assert [one.status for one in alone] == (["suspect"] if "thread" in mark else [])


def test_errors_in_files_without_times_are_not_ordered_by_name(tmp_path: Path) -> None:
    first = diagnose(tmp_path, rank_2=raised(""), rank_5=raised("", "IndexError: 9")).fired[0]
    assert (first.status, first.ranks) == ("suspect", ())
    assert "Ranks 2 and 5 each raised" in first.summary


def test_times_order_errors_of_several_files(tmp_path: Path) -> None:
    late, early = "2026-03-01 08:30:09,000 ", "2026-03-01 08:30:02,000 "
    first = diagnose(tmp_path, rank_2=raised(late), rank_5=raised(early, "IndexError: 9")).fired[0]
    assert (first.status, first.ranks) == ("fired", (5,))


def test_a_local_rank_of_several_nodes_is_no_rank(tmp_path: Path) -> None:
    one = diagnose(tmp_path, node_0=raised("[default3]:")).fired[0]
    assert one.ranks == (3,)
    two = diagnose(tmp_path, node_0=raised("[default3]:"), node_1="[default3]:ValueError: other\n").fired[0]
    assert two.ranks == ()


def test_folders_of_local_ranks_of_two_nodes_name_no_rank(tmp_path: Path) -> None:
    for node in "ab":
        folder = tmp_path / node / "attempt_0" / "3"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(raised("") if node == "b" else "step: 1 loss: 2.0\n")
    (tmp_path / "a" / "attempt_0" / "3" / "stdout.log").write_text("step: 1 loss: 2.0\n")
    assert diagnose(tmp_path).fired[0].ranks == ()


def test_a_task_that_started_a_launcher_is_no_rank(tmp_path: Path) -> None:
    killed = "srun: error: gpu-2: task 1: Killed\n"
    assert diagnose(tmp_path, job=killed).fired[0].ranks == (1,)
    assert diagnose(tmp_path, job=TORCHRUN.format(code=1, local=0) + killed).fired[0].ranks != (1,)


def test_the_first_of_several_nodes_tables_counts(tmp_path: Path) -> None:
    tables = [
        TABLE.format(second=9, host="a", rank=3, local=3, code=1, pid=71),
        TABLE.format(second=4, host="b", rank=12, local=4, code=1, pid=72),
    ]
    first = diagnose(tmp_path, job="".join(tables)).fired[0]
    assert (first.status, first.ranks) == ("suspect", (12,))


def test_the_table_of_one_node_of_several_names_nobody(tmp_path: Path) -> None:
    table = TABLE.format(second=9, host="b", rank=12, local=4, code=1, pid=72)
    first = diagnose(tmp_path, job=table).fired[0]
    assert (first.status, first.ranks, first.cause) == ("suspect", (), "exit")


def test_a_rank_in_a_small_communicator_is_no_rank_of_the_job(tmp_path: Path) -> None:
    comms = (
        "gpu-01:900:901 [2] NCCL INFO comm 0x55 rank 10 nranks 16 cudaDev 2 busId 3b000 commId 0x1 - Init COMPLETE\n"
        "gpu-01:900:901 [2] NCCL INFO comm 0x56 rank 0 nranks 2 cudaDev 2 busId 3b000 commId 0x2 - Init COMPLETE\n"
    )
    first = diagnose(tmp_path, job=comms, **{"dmesg-gpu-01": "[1.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, x\n"})
    assert first.fired[0].ranks == (10,)


def test_the_same_bus_on_another_host_is_another_device(tmp_path: Path) -> None:
    comms = "".join(
        f"gpu-0{host}:90{host}:901 [2] NCCL INFO comm 0x55 rank {rank} nranks 16 cudaDev 2 busId {bus}000 - Init\n"
        for host, rank, bus in ((1, 2, "3b"), (2, 10, "5e"))
    )
    first = diagnose(tmp_path, job=comms, **{"dmesg-gpu-03": "[1.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, x\n"})
    assert first.fired[0].ranks == ()


def test_a_kernel_line_of_another_week_is_not_part_of_the_job(tmp_path: Path) -> None:
    kernel = "[Sun Feb {day} 08:30:00 2026] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus.\n"
    job = "2026-02-22 08:25:00,000 " + raised("")[:-1].replace("\n", "\n2026-02-22 08:25:00,000 ") + "\n"
    same = diagnose(tmp_path, rank_1=job, dmesg=kernel.format(day=22)).fired[0]
    assert (same.status, same.cause) == ("fired", "device_error")
    (tmp_path / "dmesg.log").unlink()
    other = diagnose(tmp_path, rank_1=job, dmesg=kernel.format(day=15)).fired[0]
    assert (other.cause, other.ranks) == ("exception", (1,))


def test_sigabrt_alone_is_a_suspicion(tmp_path: Path) -> None:
    ended = TORCHRUN.format(code=-6, local=5)
    first = diagnose(tmp_path, job=ended).fired[0]
    assert (first.status, first.ranks, first.cause) == ("suspect", (), "signal")
    assert "Rank 5 ended first" in first.summary
    sure = diagnose(tmp_path, job="double free or corruption (!prev)\n" + ended).fired[0]
    assert (sure.status, sure.ranks) == ("fired", (5,))


def test_silent_ranks_are_no_suspects_of_a_dead_watchdog_line(tmp_path: Path) -> None:
    first = diagnose(tmp_path, job="".join(watchdog(rank) for rank in range(4))).fired[0]
    assert (first.ranks, first.cause) == ((), "all_entered")
    assert "no rank is missing" not in next_step(first)  # the files do not show how many ranks the job has
    assert "To settle it: TORCH_FR_BUFFER_SIZE=2000" in next_step(first)  # the processes that waited have ended


def test_a_call_of_one_element_is_written_in_the_singular(tmp_path: Path) -> None:
    first = diagnose(tmp_path, job="".join(watchdog(rank, op="BROADCAST", numel=1) for rank in range(4))).fired[0]
    assert "in the same BROADCAST #80 of 1 element for" in first.summary
