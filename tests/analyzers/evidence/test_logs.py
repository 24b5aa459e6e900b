"""Verdicts of text logs: the cause and its rank, victims apart, and no culprit without a proof."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import SourceError, diagnose_files
from tests.support.simulator.recorder_dumps import Job

ROOT = Path(__file__).parents[3]
WATCHDOG = (
    "[rank{rank}]:[E301 02:07:08.4 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for 600060"
    " milliseconds before timing out.\n"
)
STATE = (
    "[rank{rank}]:[E301 02:07:08.5 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception "
    "(either an error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: {enqueued}, "
    "last completed NCCL work: {completed}.\n"
)


def watchdog(rank: int, seq: int = 80, op: str = "ALLREDUCE", numel: int = 466) -> str:
    return WATCHDOG.format(rank=rank, seq=seq, op=op, numel=numel)


def state(rank: int, seq: int, enqueued: int, completed: int) -> str:
    return STATE.format(rank=rank, seq=seq, enqueued=enqueued, completed=completed)


def diagnose(folder: Path, **files: str) -> Diagnosis:
    for name, text in files.items():
        (folder / f"{name}.log").write_text(text, encoding="utf-8")
    return diagnose_files([folder])


def test_the_rank_that_raised_is_the_cause_and_the_others_are_victims(tmp_path: Path) -> None:
    lost = "[rank{r}]: RuntimeError: [gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.3]:1234\n"
    diagnosis = diagnose(
        tmp_path,
        job="".join(lost.format(r=rank) for rank in (0, 1, 3))
        + '[rank2]: Traceback (most recent call last):\n[rank2]:   File "/job/train.py", line 7, in step\n'
        "[rank2]: ValueError: label 99\n",
    )
    (finding,) = diagnosis.fired
    assert (finding.status, finding.ranks, finding.cause) == ("fired", (2,), "exception")
    assert finding.evidence["victims"] == [0, 1, 3]
    assert "job/train.py:7 in step" in finding.summary


def test_a_rank_that_prints_nothing_is_only_a_suspect(tmp_path: Path) -> None:
    (finding,) = diagnose(tmp_path, job=watchdog(0) + watchdog(1) + watchdog(3)).fired
    assert (finding.status, finding.ranks, finding.cause) == ("suspect", (2,), "not_entered")
    assert finding.evidence["collect"]


def test_a_timeout_of_a_single_rank_accuses_none(tmp_path: Path) -> None:
    (finding,) = diagnose(tmp_path, job=watchdog(5)).fired
    assert (finding.status, finding.ranks) == ("suspect", ())


@pytest.mark.parametrize(
    ("odd", "cause"), [({"op": "BROADCAST"}, "mismatch_operation"), ({"numel": 512}, "mismatch_size")]
)
def test_another_call_at_the_same_number_is_a_mismatch(tmp_path: Path, odd: dict[str, object], cause: str) -> None:
    text = (
        watchdog(0) + watchdog(1) + WATCHDOG.format(**({"rank": 2, "seq": 80, "op": "ALLREDUCE", "numel": 466} | odd))
    )
    (finding,) = diagnose(tmp_path, job=text).fired
    assert (finding.status, finding.ranks, finding.cause) == ("fired", (2,), cause)


def test_a_call_that_others_completed_is_a_stuck_device(tmp_path: Path) -> None:
    text = "".join(watchdog(r, 81) + state(r, 81, 84, 80) for r in (0, 1, 2)) + watchdog(3, 80) + state(3, 80, 84, 79)
    (finding,) = diagnose(tmp_path, job=text).fired
    assert (finding.status, finding.ranks, finding.cause) == ("suspect", (3,), "device_stuck")


def test_sigkill_without_a_text_is_explained_by_the_kernels_log(tmp_path: Path) -> None:
    table = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-05-01_08:16:53\n  host      : gpu-01\n"
        "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 1168)\n  traceback : Signal 9 (SIGKILL)\n=====\n"
    )
    (alone,) = diagnose(tmp_path, job=table).fired
    assert (alone.status, alone.ranks, alone.cause) == ("suspect", (1,), "signal")
    assert any("dmesg" in command for command in alone.evidence["collect"])
    both = diagnose(
        tmp_path, job=table, dmesg="[9.5] Out of memory: Killed process 1168 (python) anon-rss:66060288kB\n"
    )
    (finding,) = both.fired
    assert (finding.status, finding.ranks, finding.cause) == ("fired", (1,), "host_out_of_memory")


def test_an_xid_explains_the_hang_of_the_others(tmp_path: Path) -> None:
    init = "".join(
        f"gpu-01:90{r}:91{r} [{r}] NCCL INFO comm 0x5{r} rank {r} nranks 4 cudaDev {r} busId {r + 3}b000 - Init\n"
        for r in range(4)
    )
    hung = init + "".join(watchdog(rank) for rank in (0, 1, 3))
    xid = "Mar  1 08:30:00 gpu-01 kernel: NVRM: Xid (PCI:0000:5b:00): 79, pid=902, GPU has fallen off the bus.\n"
    first = diagnose(tmp_path, job=hung, kern=xid).fired[0]
    assert (first.status, first.ranks, first.cause) == ("fired", (2,), "device_error")


def test_an_xid_of_an_application_blames_no_device(tmp_path: Path) -> None:
    xid = "Mar  1 08:30:00 gpu-01 kernel: NVRM: Xid (PCI:0000:5b:00): 45, pid=902, Ch 00000008\n"
    assert diagnose(tmp_path, kern=xid).fired == ()


def test_dumps_and_logs_give_one_finding(tmp_path: Path) -> None:
    job = Job(4)
    job.steps(5)
    job.collective("all_reduce", ranks=[0, 1, 2])
    job.write(tmp_path / "dumps", ranks=[0, 1, 2])
    (tmp_path / "job.log").write_text("[rank3]: ValueError: bad\n")
    diagnosis = diagnose_files([tmp_path])
    (finding,) = diagnosis.fired
    assert (finding.status, finding.ranks, finding.cause) == ("fired", (3,), "exception")
    assert finding.evidence["op"] == "all_reduce"
    assert diagnosis.run["files_read"] == {"text log": 1, "flight-recorder dump": 3}


def test_a_loss_that_is_not_finite_is_seen_in_printed_steps(tmp_path: Path) -> None:
    text = "".join(f"step: {i}  loss: {'nan' if i > 40 else 2.5}  grad_norm: 1.0\n" for i in range(1, 60))
    (finding,) = [one for one in diagnose(tmp_path, job=text).fired if one.kind == "non_finite"]
    assert finding.first_step == 41


def test_archives_are_read_and_their_links_are_not(tmp_path: Path) -> None:
    (tmp_path / "rank_3.log").write_text("ValueError: bad\n")
    with tarfile.open(tmp_path / "evidence.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "rank_3.log", "node/rank_3.log")
        link = tarfile.TarInfo("node/passwd")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        outside = tarfile.TarInfo("../../outside.log")
        archive.addfile(outside)
    diagnosis = diagnose_files([tmp_path / "evidence.tar.gz"])
    assert [finding.ranks for finding in diagnosis.fired] == [(3,)]
    problems = " ".join(problem["problem"] for problem in diagnosis.run["file_problems"])
    assert "link" in problems
    assert "leads out" in problems


def test_logs_without_a_cause_are_not_called_healthy(tmp_path: Path) -> None:
    diagnosis = diagnose(tmp_path, job="all is well\n" * 10)
    assert "names a cause" in diagnosis.verdict
    assert "No problems" not in diagnosis.verdict


def test_a_folder_without_evidence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(range(256)) * 64)
    with pytest.raises(SourceError, match="no text log"):
        diagnose_files([tmp_path])


def test_a_process_that_the_kernel_killed_for_another_job_is_not_the_cause(tmp_path: Path) -> None:
    killed = "[9.5] Out of memory: Killed process 77 (chrome) anon-rss:4096kB\n"
    first = diagnose(tmp_path, job="[rank1]: ValueError: bad\n", dmesg=killed).fired[0]
    assert (first.ranks, first.cause) == ((1,), "exception")


def test_ranks_that_the_launcher_ended_are_not_named(tmp_path: Path) -> None:
    """Under load the victims are stopped before they print an error; all ends have the same second in the table."""
    entry = "[{i}]:\n  time      : 2026-11-22_14:36:26\n  host      : n\n  rank      : {r} (local_rank: {r})\n"
    entry += "  exitcode  : {code}\n  error_file: <N/A>\n  traceback : Signal {signal} received by PID 1218{r}\n"
    table = "ChildFailedError: \n====\njob.py FAILED\n----\nFailures:\n"
    for index, rank in enumerate((0, 2), 1):
        table += entry.format(i=index, r=rank, code=f"-15 (pid: 1218{rank})  (SIGTERM)", signal="15 (SIGTERM)")
    table += "----\nRoot Cause (first observed failure):\n"
    table += entry.format(i=0, r=1, code="-11 (pid: 12181)  (SIGSEGV)", signal="11 (SIGSEGV)") + "====\n"
    (finding,) = diagnose(tmp_path, job=table.replace("====", "=" * 55).replace("----", "-" * 55)).fired
    assert (finding.status, finding.ranks, finding.cause) == ("fired", (1,), "signal")
    assert finding.evidence["signal"] == "SIGSEGV"


SLURM = """+ srun --kill-on-bad-exit=1 bash -c torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d train.py
0: {"step": 0, "loss": 9.0000, "step_time_s": 2.362}
0: {"step": 50, "loss": 6.4643, "step_time_s": 2.365}
0: {"step": 850, "loss": 2.5798, "step_time_s": 2.378}
slurmstepd: error: *** STEP 9.0 ON n01 CANCELLED AT 2026-11-24T13:40:22 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***
srun: error: Node failure on n03
srun: error: n03: task 2: Killed
16: [rank16]:[W1124 13:40:20.114123001 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=87): got 0 bytes
1: [rank9]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2106, remote process exited
1: [rank9]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
srun: error: n01: task 0: Terminated
"""


def test_a_job_has_the_size_of_its_command_and_the_steps_of_its_last_line(tmp_path: Path) -> None:
    """Three printed lines are no three steps, two ranks that print are no job of two."""
    diagnosis = diagnose(tmp_path, job=SLURM)
    facts = diagnosis.run
    assert (facts["num_ranks"], facts["steps"]) == (32, 850)
    assert facts["ended"] == "cancelled by Slurm at 2026-11-24T13:40:22 (node failure)"
    (finding,) = diagnosis.fired
    assert (finding.cause, finding.evidence["host"]) == ("node_failed", "n03")
    assert finding.evidence["victims"] == [9], "rank 16 is the first of the node that failed"


@pytest.mark.parametrize(
    "command", ["torchrun --nproc_per_node=8 --nnodes=2 t.py", "torchrun --nnodes 1:2 --nproc-per-node 8 t"]
)
def test_the_order_of_a_commands_options_does_not_matter_and_a_range_is_no_size(tmp_path: Path, command: str) -> None:
    facts = diagnose(tmp_path, job=f"+ {command}\n" + SLURM.partition("\n")[2]).run
    assert facts["num_ranks"] == (16 if "=2" in command else 2)


def test_the_loss_is_reported_from_its_first_value(tmp_path: Path) -> None:
    lines = (f"step {10 * i} | loss {2 + 10 / (1 + i):.4f} | lr 3.0e-04\n" for i in range(40))
    verdict = diagnose(tmp_path, job="".join(lines)).verdict
    assert "40 printed steps to step 390, the loss fell from 12 to 2.2" in verdict
    assert "(median of the last 4)" in verdict


def test_the_end_that_torchrun_prints_is_the_end(tmp_path: Path) -> None:
    text = """[rank2]: Traceback (most recent call last):
[rank2]:   File "/job/train.py", line 7, in step
[rank2]: ValueError: label 99
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_02:31:55
  host      : node-a17
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 41210)
  error_file: <N/A>
============================================================
"""
    assert diagnose(tmp_path, job=text).run["ended"] == "exit code 1 at 2026-11-25 02:31:55, according to the launcher"
