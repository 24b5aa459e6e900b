"""The sentence and the next step claim what the line states: no more, and about the right host and device."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed

KEEP_ALIVE = (
    "W0301 10:03:12.600000 44 torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:1341] The node 'n2.lab_44_0' "
    "has failed to send a keep-alive heartbeat to the rendezvous '71' due to an error of type "
    "RendezvousConnectionError.\n"
)
RECEIVE = (
    "[W301 10:03:12.501 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=3, addr=[{own}]:42118, "
    "remote=[{store}]:29400): failed to recv, got 0 bytes\n"
)
CHAIN = (
    "Traceback (most recent call last):\n"
    '  File "/env/site-packages/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", line 155, in {call}\n'
    "torch.distributed.DistNetworkError: {inner}\n\n"
    "The above exception was the direct cause of the following exception:\n\n"
    "Traceback (most recent call last):\n"
    '  File "/env/bin/torchrun", line 8, in <module>\n'
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. "
    "See inner exception for details.\n"
)


def first_of(folder: Path, text: str) -> Finding:
    return diagnosed(folder, "job.log", text).fired[0]


@pytest.mark.parametrize(
    ("own", "store", "named"),
    [("::ffff:10.1.0.12", "::ffff:10.1.0.11", "10.1.0.11"), ("n2.lab", "n1.lab", "n1.lab"),
     ("10.1.0.12", "10.1.0.11", "10.1.0.11"), ("fd00::12", "fd00::11", "fd00::11")],
)  # fmt: skip
def test_the_peer_of_a_broken_socket_is_its_remote_end(own: str, store: str, named: str, tmp_path: Path) -> None:
    finding = first_of(tmp_path, "step 9 loss 2.1\n" + RECEIVE.format(own=own, store=store) + KEEP_ALIVE)
    assert finding.cause == "connection_lost"
    assert finding.evidence["peers"] == [named]
    assert f"process at {named}," in next_step(finding)
    assert finding.summary.startswith("The launcher of n2.lab lost the connection to the rendezvous store")


def test_an_agent_that_loses_the_store_points_to_the_host_of_the_store(tmp_path: Path) -> None:
    finding = first_of(tmp_path, "step 9 loss 2.1\n" + KEEP_ALIVE)
    assert "this log is from a victim" in finding.summary
    assert "--rdzv-endpoint" in next_step(finding)


def test_a_socket_to_the_own_host_is_no_wrong_interface(tmp_path: Path) -> None:
    text = RECEIVE.format(own="localhost", store="localhost").replace(
        "failed to recv, got 0 bytes", "Connection refused"
    )
    finding = first_of(tmp_path, f"n1: step 9 loss 2.1\nn2: step 9 loss 2.1\nn1: {text}")
    assert finding.cause == "connection_lost"
    assert "on that host" in next_step(finding)


def test_an_address_that_no_launcher_answers_at_is_named(tmp_path: Path) -> None:
    inner = "The client socket has timed out after 60000ms while trying to connect to (n1.lab, 29400)."
    finding = first_of(tmp_path, CHAIN.format(call="_create_tcp_store", inner=inner))
    assert finding.cause == "rendezvous"
    assert finding.summary.startswith("The rendezvous store at n1.lab:29400 could not be reached")
    assert next_step(finding).startswith("Look at n1.lab first")


def test_a_lost_store_does_not_say_that_ranks_did_not_join(tmp_path: Path) -> None:
    finding = first_of(
        tmp_path, "step 9 loss 2.1\n" + CHAIN.format(call="_call_store", inner="failed to recv, got 0 bytes")
    )
    assert finding.cause == "rendezvous"
    assert "lost its connection to it" in finding.summary
    assert "did not join" not in next_step(finding)


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]: RuntimeError: HIP error: unspecified launch failure",
        "[rank3]: torch.AcceleratorError: HIP error: an illegal memory access was encountered",
        "Memory access fault by GPU node-4 (Agent handle: 0x55d3) on address 0x7f11a4000000. Reason: Unknown.",
        ":0:rocdevice.cpp :2984: 42112 us: [pid:44 tid:0x7f1a] Callback: Queue 0x7f1a Aborting with error : "
        "HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION: The agent attempted to access memory beyond the largest legal "
        "address. code: 0x29",
    ],
)
def test_a_kernel_fault_of_an_amd_gpu_gets_amds_tools(line: str, tmp_path: Path) -> None:
    finding = first_of(tmp_path, f"step 9 loss 2.1\n{line}\n")
    assert "ran a kernel that faulted" in finding.summary
    assert "AMD_SERIALIZE_KERNEL" in next_step(finding)
    assert "xid" not in next_step(finding).lower()


def test_an_illegal_access_is_no_error_of_the_device(tmp_path: Path) -> None:
    finding = first_of(
        tmp_path, "[rank2]: torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    )
    assert finding.summary.startswith("Rank 2 ran a kernel that faulted")
    assert "CUDA_LAUNCH_BLOCKING" in next_step(finding)


def test_an_event_of_a_port_is_no_failed_transfer(tmp_path: Path) -> None:
    line = "n3:41:77 [2] transport/net_ib.cc:253 NCCL WARN NET/IB : mlx5_1:1 Got async event : port error\n"
    finding = first_of(tmp_path, f"step 9 loss 2.1\n{line}")
    assert finding.cause == "infiniband"
    assert "transfer" not in finding.summary
    assert "port error" in finding.summary


def test_ddp_raises_for_unused_parameters(tmp_path: Path) -> None:
    error = "Expected to have finished reduction in the prior iteration before starting a new one."
    finding = first_of(tmp_path, f"[rank0]: RuntimeError: {error}\n")
    assert "wait" not in finding.summary
    assert "DDP raised an error" in finding.summary


def test_a_blocked_watchdog_of_an_ended_process_needs_another_run(tmp_path: Path) -> None:
    line = (
        "[rank2]:[E301 10:10:00.1 ProcessGroupNCCL.cpp:1316] [PG ID 0 PG GUID 0(default_pg) Rank 2] ProcessGroupNCCL's "
        "watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.\n"
    )
    assert "TORCH_NCCL_ENABLE_MONITORING=0" in next_step(first_of(tmp_path, line))


def test_a_monitor_that_ends_a_silent_rank_reports_a_hang(tmp_path: Path) -> None:
    monitor = "[2026-03-01 10:31:30,120] [WARNING] [RankMonitorServer812@n1:3] Did not get subsequent heartbeat. "
    text = f"step 9 loss 2.1\n{monitor}Waited 90.12 seconds.\n"
    text += "[2026-03-01 10:31:31,120] [ERROR] failed (exitcode: -9) local_rank: 3 (pid: 811) of binary: python\n"
    finding = first_of(tmp_path, text)
    assert finding.kind == "hang"
    assert finding.summary.startswith("Rank 3 made no progress for 90 s")
    killed = text.replace(monitor, "# ").replace("Waited 90.12 seconds.", "")
    assert first_of(tmp_path, killed).cause == "signal"


def test_the_tasks_that_jax_lists_sent_no_heartbeat(tmp_path: Path) -> None:
    task = "/job:jax_worker/replica:0/task:{}\n"
    head = (
        "F0301 10:00:00.075587  44 client.h:77] Terminating process because the JAX distributed service detected fatal "
        "errors. absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n"
    )
    finding = first_of(tmp_path, f"step 9 loss 2.1\n{head}{task.format(3)}{task.format(5)}The tasks have crashed.\n")
    assert (finding.cause, finding.ranks) == ("connection_lost", (3, 5))
    assert "ranks 3 and 5 sent no heartbeat" in finding.summary


def test_a_failed_transfer_over_efa_gets_its_own_tools(tmp_path: Path) -> None:
    line = (
        "n1:79:411 [4] ofi_process_cq:310 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 103. Error: 4126 "
        "(Unresponsive receiver). Peer host id: i-0ce6\n"
    )
    finding = first_of(tmp_path, f"step 9 loss 2.1\n{line}")
    assert finding.cause == "infiniband"
    assert "ibstat" not in next_step(finding)
    assert "fi_info" in next_step(finding)


def test_the_line_below_a_heading_is_quoted(tmp_path: Path) -> None:
    text = (
        "n3:906:1411 [3] mlx5: n3: got completion with error:\n00000000 00008813 12003f19 0001d8d2\n"
        "n3:906:1411 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.7<527> with "
        "status=12 opcode=0 len=0 vendor err 129 (Recv)\n"
    )
    assert "peer 10.0.0.7" in first_of(tmp_path, f"step 9 loss 2.1\n{text}").summary


@pytest.mark.parametrize(
    ("error", "cause", "word"),
    [
        ("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: x", "download",
         "rate limits"),
        ("RuntimeError: common/gemm/cublaslt_gemm.cu:470 in function cublas_gemm: cuBLAS Error: the library was not "
         "initialized", "exception", "smaller batch"),
    ],
)  # fmt: skip
def test_errors_of_libraries_have_a_next_step(error: str, cause: str, word: str, tmp_path: Path) -> None:
    finding = first_of(tmp_path, f"[rank1]: Traceback (most recent call last):\n[rank1]: {error}\n")
    assert finding.cause == cause
    assert word in next_step(finding)


def test_a_pod_whose_container_crashed_is_named(tmp_path: Path) -> None:
    pod = (
        "Name:             llm-worker-2\nNamespace:        train\nNode:             n2/10.0.0.2\n"
        "Status:           Running\nContainers:\n  pytorch:\n    State:          Running\n"
        "    Last State:     Terminated\n      Reason:       Error\n      Exit Code:    139\n"
        "    Restart Count:  1\n"
    )
    assert first_of(tmp_path, pod).summary.startswith("A process of llm-worker-2 died of SIGSEGV")
