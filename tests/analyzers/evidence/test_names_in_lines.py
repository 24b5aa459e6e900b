"""What lines name besides a cause: hosts, processes, addresses without a route, and how calls differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.report.wording.explained import next_step
from analyzers.report.wording.loss_lines import loss_line
from tests.analyzers.evidence.test_waits_and_ends import waited
from tests.analyzers.evidence.written import diagnosed

STUCK = (
    "[rank{rank}]:[E212 08:15:36.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
    "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring collectives.\n"
)
FINGERPRINT = (
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 3 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=81, OpType={op}, TensorShape=[4096], TensorDtypes={dtype}), but Rank 1 is "
    "running collective: CollectiveFingerPrint(SequenceNumber=81, OpType=REDUCE, TensorShape=[{size}], "
    "TensorDtypes=Float).\n"
)
FRAMES = " *** Process received signal ***\n{at} Signal: Bus error (7)\n{at} Signal code: Non-existant address (2)\n"


@pytest.mark.parametrize(("host", "named"), [("...", None), ("---", None), ("gpu-3", "gpu-3")])
def test_a_placeholder_is_not_taken_for_a_host_name(tmp_path: Path, host: str, named: str | None) -> None:
    text = f"slurmstepd: error: *** JOB 71 ON {host} CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***\n"
    for finding in diagnosed(tmp_path, "job.log", text).fired:
        assert (finding.cause, finding.evidence.get("host")) == ("time_limit", named)


@pytest.mark.parametrize(
    "error", ["(errno: 113 - No route to host)", "(errno: 101 - Network is unreachable)", "name: EHOSTUNREACH"]
)
def test_an_unreachable_address_is_not_a_node_that_did_not_join(tmp_path: Path, error: str) -> None:
    text = f"RuntimeError: The client socket has failed to connect to any network address of (lead7, 2951). {error}.\n"
    (found,) = diagnosed(tmp_path, "job.log", text).fired
    assert (found.cause, found.ranks, found.evidence.get("host")) == ("unreachable", (), None)
    assert "MASTER_ADDR resolves to" in next_step(found)
    (found,) = diagnosed(tmp_path, "job.log", text.replace(error, "(errno: 111 - Connection refused)")).fired
    assert found.cause == "rendezvous"


def test_a_process_that_open_mpi_reports_is_named_where_no_line_states_its_rank(tmp_path: Path) -> None:
    first, second = "[cpu-07:20417]", "[cpu-07:20419]"
    (found,) = diagnosed(tmp_path, "job.log", first + FRAMES.format(at=first)).fired
    assert (found.cause, found.ranks, found.evidence.get("host")) == ("signal", (), "cpu-07")
    assert found.summary.startswith("Process 20417 on cpu-07 died of SIGBUS")
    frames = [
        "/lib64/libpthread.so.0(+0xf5d0)[0x2b09b2d695d0]",
        "/opt/env/lib/libfast_ops.so(_ZN4fast3runEv+0x71)[0x2b0a3bad6871]",
        "/lib64/libpython3.11.so.1.0(PyCFunction_Call+0xe9)[0x2b09b29350f9]",
    ]
    stack = "".join(f"{first} [{place:2}] {frame}\n" for place, frame in enumerate(frames))
    (found,) = diagnosed(tmp_path, "job.log", first + FRAMES.format(at=first) + stack).fired
    assert "died of SIGBUS in libfast_ops.so (_ZN4fast3runEv), and no traceback" in found.summary
    end = "mpirun noticed that process rank 4 with PID 20419 on node cpu-07 exited on signal 7 (Bus error).\n"
    (found,) = diagnosed(tmp_path, "job.log", second + FRAMES.format(at=second) + end).fired
    assert (found.cause, found.ranks) == ("signal", (4,))


@pytest.mark.parametrize(
    ("peer", "where", "step"),
    [
        ("10.3.0.8", "the peer 10.3.0.8", "Read the log of the process at 10.3.0.8"),
        ("127.0.0.1", "a process on the same host", "the other ranks on that host"),
    ],
)
def test_a_peer_at_a_loopback_address_is_a_process_of_the_host(
    tmp_path: Path, peer: str, where: str, step: str
) -> None:
    text = f"RuntimeError: [../gloo/transport/tcp/pair.cc:575] Connection closed by peer [{peer}]:3982\n"
    (found,) = diagnosed(tmp_path, "job.log", text).fired
    assert (found.cause, found.ranks) == ("connection_lost", ())
    assert f"lost the connection to another rank, {where}: " in found.summary
    assert step in next_step(found)
    reset = text.replace("Connection closed by peer", "Read error").replace("\n", ": Connection reset by peer\n")
    (found,) = diagnosed(tmp_path, "job.log", reset).fired
    assert f"lost the connection to another rank, {where}: " in found.summary


def test_a_wait_for_a_store_that_timed_out_is_found_above_a_cut_traceback(tmp_path: Path) -> None:
    text = (
        "[rank2]:[W326 22:36:28.1 socket.cpp:489] [c10d] waitForInput: socket SocketImpl(fd=6, addr=[10.0.0.2]:5281, "
    )
    text += "remote=[10.0.0.9]:2490) timed out after 600000ms\nTraceback (most recent call last):\n"
    (found,) = diagnosed(tmp_path, "job.log", text + '  File "/srv/train.py", line 9, in <module>\n').fired
    assert (found.cause, found.status, found.ranks) == ("rendezvous", "suspect", ())
    assert found.evidence["address"] == "10.0.0.9"


def test_a_rank_with_a_blocked_watchdog_may_be_waiting_as_well(tmp_path: Path) -> None:
    (found,) = diagnosed(tmp_path, "job.log", STUCK.format(rank=5) + waited(2)).fired
    assert (found.cause, found.ranks) == ("all_entered", ())
    assert "rank 5 may wait in it too: its watchdog was blocked" in found.summary


@pytest.mark.parametrize(
    ("op", "dtype", "size", "begin"),
    [
        ("ALLREDUCE", "Float", 4096, "Ranks called different collectives at the same place"),
        ("REDUCE", "Float", 512, "Ranks called the same collective with different sizes"),
        ("REDUCE", "Half", 4096, "Ranks called the same collective with different element types"),
    ],
)
def test_the_difference_between_mismatched_calls_is_named(
    tmp_path: Path, op: str, dtype: str, size: int, begin: str
) -> None:
    (found,) = diagnosed(tmp_path, "job.log", FINGERPRINT.format(op=op, dtype=dtype, size=size)).fired
    assert found.summary.startswith(f"{begin}: rank 1 calls REDUCE [{size}] Float; rank 3 calls {op} [4096] {dtype}")


def test_a_loss_that_becomes_nonfinite_has_no_final_value(tmp_path: Path) -> None:
    lines = [f"step {n} loss {2 - n / 10}\n" for n in range(1, 6)] + [f"step {n} loss nan\n" for n in range(6, 12)]
    facts = diagnosed(tmp_path, "job.log", "".join(lines)).run
    assert loss_line(facts).endswith("1.5000 at the last finite step. NaN or Inf from step 6 to the end.")
    facts = diagnosed(tmp_path, "job.log", "".join([*lines, "step 12 loss 1.4\n"])).run
    assert loss_line(facts).endswith("1.4000 at the end")
