"""Lines that follow from another line of the same log, and what libraries print below or above an error."""

from __future__ import annotations

from pathlib import Path

from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed

RAISED = 'Traceback (most recent call last):\n  File "{path}", line 9, in run\n    result()\n{error}\n'


def test_an_error_that_says_that_an_actor_died_is_not_its_cause(tmp_path: Path) -> None:
    text = (
        "WARNING worker.py:1829 -- A worker died or was killed while executing a task by an unexpected system error. "
        "Node ID: 3c Worker IP address: 10.0.0.7 Worker port: 10016 Worker PID: 4711 Worker exit type: SYSTEM_ERROR\n"
        "ray.exceptions.RayTaskError(RuntimeError): ray::Trainable.train() (pid=40, ip=10.0.0.7, repr=Trainer)\n"
        '  File "/job/ray_util.py", line 88, in run\n    self._ret = self._target(*self._args)\n'
        "RuntimeError: The actor died unexpectedly before finishing this task.\n"
    )
    finding = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (finding.cause, finding.status) == ("exit", "suspect")
    assert finding.summary.startswith("A Ray worker (process 4711 on 10.0.0.7) died")


def test_a_rendezvous_that_a_failed_worker_closed_is_not_the_cause(tmp_path: Path) -> None:
    closed = "torch.distributed.elastic.rendezvous.api.RendezvousClosedError"
    agent = RAISED.format(path="/env/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py", error=closed)
    failed = "E0301 10:00:00.000000 870 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) "
    text = f"{failed}local_rank: 0 (pid: 876) of binary: /usr/bin/python3\n{agent}"
    assert diagnosed(tmp_path, "job.log", text).fired[0].cause == "exit"
    assert diagnosed(tmp_path, "alone.log", agent).fired[0].cause == "rendezvous"


def killed(rank: int, signal: str) -> str:
    """Hydra's report of a process that ended badly."""
    rule = "=" * 83
    head = f"{rule}\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
    return f"{head}=   RANK {rank} PID {4700 + rank} RUNNING AT n1\n=   KILLED BY SIGNAL: {signal}\n{rule}\n"


def test_the_processes_that_hydra_kills_after_one_aborted_are_not_to_blame(tmp_path: Path) -> None:
    reason = "n1:rank1: Assertion failure at psm3/ptl_am/ptl.c:196: nbytes == req->recv_msglen\n"
    ends = killed(1, "6 (Aborted)") + killed(0, "9 (Killed)")
    (finding,) = diagnosed(tmp_path, "job.log", reason + ends).fired
    assert (finding.cause, finding.ranks) == ("signal", (1,))
    assert "assertion `nbytes == req->recv_msglen` failed at psm3/ptl_am/ptl.c:196" in finding.summary
    unexplained = diagnosed(tmp_path, "unexplained.log", ends).fired[0]
    assert unexplained.ranks == (0,)  # nothing says why rank 1 aborted: the peer that was killed may be the reason


def test_the_last_error_of_nccl_is_quoted(tmp_path: Path) -> None:
    error = (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, internal error, NCCL version 2.20.5\n"
        "ncclInternalError: Internal check failed.\nLast error:\n{}\n"
    )
    path = "/env/torch/distributed/distributed_c10d.py"
    last = RAISED.format(path=path, error=error.format("Failed to find reverse path from remNode 0/2 to {node} 0/7"))
    finding = diagnosed(tmp_path, "job.log", last).fired[0]
    assert (finding.cause, finding.ranks, finding.status) == ("nccl_error", (), "suspect")
    assert "Failed to find reverse path from remNode 0/2 to {node} 0/7" in finding.summary
    empty = diagnosed(tmp_path, "empty.log", RAISED.format(path=path, error=error.format(""))).fired[0]
    assert "does not name its cause" in empty.summary


def test_a_network_plugin_that_finds_no_device_has_transferred_nothing(tmp_path: Path) -> None:
    warn = "[2026-03-01 10:00:00] n1:19:27 [0] {}:1 NCCL WARN NET/OFI {}\n"
    text = warn.format("nccl_net_ofi_rdma_init", "OFI fi_getinfo() call failed: No data available")
    text += warn.format("nccl_net_ofi_create_plugin", "Unable to find a protocol that worked.  Failing initialization.")
    finding = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (finding.cause, finding.ranks) == ("infiniband", ())
    assert finding.summary.startswith("NCCL's network plugin could not open its device")
    assert "fi_info" in next_step(finding)


def test_agents_of_finished_workers_that_lose_their_store_end_no_job(tmp_path: Path) -> None:
    lost = (
        "[2026-03-01 18:00:02,010] torch.distributed.elastic.rendezvous.dynamic_rendezvous: [WARNING] The node "
        "'n1_212_0' has failed to send a keep-alive heartbeat to the rendezvous 'none' due to an error of type "
        "RendezvousConnectionError.\n"
    )
    steps = "".join(f"step {step} loss {2 - step / 10}\n" for step in range(1, 9))
    saved = "Saved final checkpoint to /checkpoints/final\n"
    assert not diagnosed(tmp_path, "job.log", steps + saved + lost).fired
    assert diagnosed(tmp_path, "lost.log", steps + lost).fired[0].cause == "connection_lost"


def test_the_cause_on_the_second_line_of_a_message_is_the_cause(tmp_path: Path) -> None:
    error = "jaxlib._jax.XlaRuntimeError: DEADLINE_EXCEEDED: Deadline Exceeded\nRPC: /tensorflow.CoordinationService/"
    text = RAISED.format(path="/job/train.py", error=f"{error}RegisterTask")
    assert [one.cause for one in diagnosed(tmp_path, "job.log", text).fired] == ["rendezvous"]
    timeout = "[E ProcessGroupNCCL.cpp:456] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"
    oom = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 MiB.\n{timeout}"
    finding = diagnosed(tmp_path, "oom.log", RAISED.format(path="/job/train.py", error=oom)).fired[0]
    assert (finding.cause, finding.evidence["error_type"]) == ("out_of_memory", "OutOfMemoryError")


def test_an_abort_of_abseil_is_an_end(tmp_path: Path) -> None:
    line = "*** SIGABRT received by PID 9361 (TID 9361) on cpu 40 from PID 9361; stack trace: ***\n"
    finding = diagnosed(tmp_path, "job.log", line).fired[0]
    assert (finding.cause, finding.ranks, finding.status) == ("signal", (), "suspect")


def test_the_tools_of_another_vendor_are_not_advised_for_an_npu(tmp_path: Path) -> None:
    line = "EE1002: Stream synchronize timeout. rtDeviceSynchronize execute failed, reason=[stream sync timeout]\n"
    finding = diagnosed(tmp_path, "job.log", line).fired[0]
    assert finding.cause == "device_stuck"
    assert "npu-smi" in next_step(finding)
    assert "nvidia-smi" not in next_step(finding)


def test_a_loader_worker_that_got_sigterm_did_not_run_out_of_memory(tmp_path: Path) -> None:
    said = {}
    for how in ("Terminated", "Killed"):
        error = f"RuntimeError: DataLoader worker (pid 4711) is killed by signal: {how}. "
        text = RAISED.format(path="/job/train.py", error=error)
        finding = diagnosed(tmp_path, f"{how}.log", text).fired[0]
        assert finding.cause == "data_worker"
        said[how] = next_step(finding)
    assert "SIGTERM" in said["Terminated"]
    assert "host memory" in said["Killed"]


def test_the_frame_of_another_process_is_no_message(tmp_path: Path) -> None:
    text = RAISED.format(path="/job/train.py", error="AssertionError\n    self.run(**options)")
    finding = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (finding.cause, finding.evidence["error_type"]) == ("exception", "AssertionError")
    assert "options" not in finding.summary
