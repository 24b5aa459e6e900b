"""Lines of libraries, launchers and drivers of other platforms: what they say, and nothing beyond it."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("EI0009: [PID: 71] Transport init error. Reason: createLink para:rank[1], dst_rank[0]", "a link between two"),
        ("EI0002: [PID: 71] The wait execution of the Notify register times out.", "no notification"),
    ],
)
def test_a_rank_that_hccl_did_not_hear_from_was_not_lost(tmp_path: Path, line: str, text: str) -> None:
    first = diagnosed(tmp_path, "job.log", f"[rank1]: {line}\n").fired[0]
    assert (first.cause, first.ranks, first.status) == ("connection_lost", (), "suspect")
    assert first.summary.startswith("Rank 1 waited in vain for another rank")
    assert text in first.summary
    lost = diagnosed(tmp_path, "job.log", "[rank1]: RuntimeError: [x.cc:1] Connection reset by peer\n").fired[0]
    assert lost.summary.startswith("Rank 1 lost the connection")


QUORUM = "torchft::lighthouse: 2026-03-01T10:00:{n:02d}.101+00:00 - INFO start: {text}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("No quorum, only have 2 participants, need 3", "2 take part, of 3 that it needs"),
        ("New quorum not ready, only have 2 participants, need min_replicas 3 [2/2 healthy]", "of 3 that it needs"),
        (
            "New quorum not ready, only have 1 participants, need at least half of 4 healthy workers [1/4]",
            "1 take part, of 4 that send heartbeats",
        ),
    ],
)
def test_replicas_that_torchft_waits_for(tmp_path: Path, text: str, said: str) -> None:
    waits = "".join(QUORUM.format(n=n, text=text) for n in range(9))
    first = diagnosed(tmp_path, "lighthouse.log", waits).fired[0]
    assert (first.cause, first.status) == ("rendezvous", "suspect")
    assert said in first.summary
    assert "replicas that do not take part" in next_step(first)
    formed = waits + QUORUM.format(n=30, text="Fast quorum found! [3/3 participants healthy]")
    assert not diagnosed(tmp_path, "lighthouse.log", formed).fired


def test_a_quorum_among_many_lines_that_was_lost_in_the_end(tmp_path: Path) -> None:
    one = QUORUM.format(n=1, text="No quorum, only have 1 participants, need 2")
    formed = one + QUORUM.format(n=2, text="Fast quorum found! [2/2 participants healthy]")
    assert not diagnosed(tmp_path, "lighthouse.log", formed * 80).fired
    assert diagnosed(tmp_path, "lighthouse.log", formed * 80 + one * 5).fired[0].cause == "rendezvous"


def test_a_page_fault_of_an_amd_gpu_is_that_of_the_training(tmp_path: Path) -> None:
    fault = (
        "[22340.105945] amdgpu 0000:c1:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:8 pasid:32775, for "
        "process {name} pid 7286 thread {name} pid 7286)\n"
    )
    first = diagnosed(tmp_path, "dmesg.txt", fault.format(name="python3") * 3).fired[0]
    assert (first.cause, first.ranks) == ("device_error", ())
    assert "AMD_SERIALIZE_KERNEL" in next_step(first)
    assert not diagnosed(tmp_path, "dmesg.txt", fault.format(name="glxgears")).fired


def test_the_operation_is_said_although_torch_printed_no_number(tmp_path: Path) -> None:
    text = "".join(
        f"[E ProcessGroupNCCL.cpp:587] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(OpType=REDUCE, Timeout(ms)=1800000) ran for 180{rank}000 milliseconds before timing out.\n"
        for rank in (1, 3)
    )
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("all_entered", ())
    assert "Ranks 1 and 3 gave up waiting for other ranks in REDUCE, and no line names the rank" in first.summary


def test_a_client_mesh_without_heartbeats_is_a_wait(tmp_path: Path) -> None:
    text = "2026-03-01 10:00:00 10.0.0.9 [3] read shard 3\n"
    text += "2026-03-01 10:05:41 Client mesh is unhealthy with uneven heartbeats\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.kind, first.status, first.ranks) == ("hang", "suspect", ())


def test_a_torchrun_that_colossalai_could_not_run(tmp_path: Path) -> None:
    text = "Error: failed to run torchrun --nproc_per_node=4 --nnodes=1 train.py on 127.0.0.1{more}\n"
    assert diagnosed(tmp_path, "job.log", text.format(more="")).fired[0].cause == "exit"
    no_login = diagnosed(tmp_path, "job.log", text.format(more=", is localhost: False, exception: No methods")).fired[0]
    assert no_login.cause == "launch_failed"
    own = diagnosed(tmp_path, "job.log", "KeyError: 'label'\n" + text.format(more="")).fired[0]
    assert own.cause == "exception"


def test_a_level_in_brackets_marks_the_whole_line_as_an_error(tmp_path: Path) -> None:
    text = "[10:02:31.500][COMPILER    ][error][tid:4F] Failed to load kernel for node: N6. Got error: NO_SUCH_UNIT\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert 'is: "Failed to load kernel for node: N6. Got error: NO_SUCH_UNIT"' in first.summary


CCL = "2026:03:01-10:00:20:({pid}) |CCL_ERROR| atl_ofi.cpp:237 init: can't find suitable provider\n"
CRASH = "[node17:{pid}:0:{pid}] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)\n"


def test_a_process_that_found_no_provider_and_crashed(tmp_path: Path) -> None:
    first = diagnosed(tmp_path, "job.log", CCL.format(pid=4410) + CRASH.format(pid=4410)).fired[0]
    assert first.cause == "no_interface"
    other = diagnosed(tmp_path, "job.log", CCL.format(pid=4410) + CRASH.format(pid=9)).fired[0]
    assert (other.cause, "SIGSEGV" in other.summary) == ("signal", True)
    later = diagnosed(tmp_path, "job.log", CRASH.format(pid=4410) + CCL.format(pid=4410)).fired[0]
    assert later.cause == "signal"


def test_memory_that_an_adapter_could_not_get_is_not_the_hosts(tmp_path: Path) -> None:
    text = CCL.format(pid=9).replace("init: can't find suitable provider", "init: fi_endpoint(prov)")
    text += " fails with ret: -12, strerror: Cannot allocate memory\n"
    assert diagnosed(tmp_path, "job.log", text).fired[0].cause == "no_interface"


def test_an_address_that_a_process_did_not_find_before_it_exited(tmp_path: Path) -> None:
    text = "Failed to connect to client mesh master: tpu-head:56419\n"
    ended = "Exception: process 1 terminated with exit code 17\n"
    first = diagnosed(tmp_path, "job.log", text + ended).fired[0]
    assert (first.cause, first.ranks) == ("unreachable", ())
    assert diagnosed(tmp_path, "job.log", ended).fired[0].ranks == (1,)
    assert diagnosed(tmp_path, "job.log", ended + text).fired[0].cause == "exit"


def test_a_peer_that_no_longer_reaches_a_process_that_exited_is_not_the_cause(tmp_path: Path) -> None:
    refused = "(Worker pid=77, ip=10.0.0.1) Failed to connect to client mesh master: tpu-head:56419\n"
    ended = "Exception: process 3 terminated with exit code 17\n"
    first = diagnosed(tmp_path, "job.log", refused + ended).fired[0]
    assert (first.cause, first.ranks) == ("exit", (3,))


IB = "gpu1:132{n}:167{n} [0] transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : {event}\n"


@pytest.mark.parametrize(
    ("event", "is_fault"),
    [("client reregistration", False), ("port active", False), ("GID table change", False), ("port error", True)],
)
def test_an_event_of_the_adapter_is_a_fault_only_if_it_is_one(tmp_path: Path, event: str, is_fault: bool) -> None:
    text = "".join(IB.format(n=n, event=event) for n in range(4))
    assert [one.cause for one in diagnosed(tmp_path, "job.log", text).fired] == ["infiniband"] * is_fault


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "demo error: In function init(): synDeviceAcquire(&handle, nullptr) failed with synapse error: 20",
            "device_setup",
        ),
        (
            "libfabric:45:170::efa:cq:efa_rdm_txe_handle_error():737<warn> err: 5, message: Invalid address",
            "infiniband",
        ),
    ],
)
def test_devices_and_adapters_that_refuse(tmp_path: Path, line: str, cause: str) -> None:
    assert diagnosed(tmp_path, "job.log", f"{line}\n").fired[0].cause == cause


def test_a_traceback_without_its_error_is_reported_with_the_error_line_before_it(tmp_path: Path) -> None:
    text = "2026:03:01-10:00:20:(  71) |CCL_ERROR| global.cpp:150 getenv: condition mode == sockets failed\n"
    text += 'Traceback (most recent call last):\n  File "/job/train.py", line 4, in <module>\n    trainer.train()\n'
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.status) == ("exception", "suspect")
    assert "condition mode == sockets failed" in first.summary


def test_an_error_that_another_worker_crashed_is_not_the_cause(tmp_path: Path) -> None:
    text = (
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker IP address: "
        "10.0.0.2 Worker PID: 42\n"
        'Traceback (most recent call last):\n  File "/job/drive.py", line 9, in fit\n    raise failed\n'
        "RuntimeError: Worker crashed during call to train.\n"
    )
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert first.cause == "exit"
    assert "process 42 on 10.0.0.2" in first.summary


BAR = "  3%|3         | 3/78 [00:09<3:37,  3.02s/it]"


@pytest.mark.parametrize(
    ("said", "cause"),
    [("INTERNAL: Accelerator device halted prematurely", "device_error"), ("Lane 3 did not settle", "unnamed_error")],
)
def test_a_fatal_line_of_abseil_that_continues_a_progress_bar(tmp_path: Path, said: str, cause: str) -> None:
    text = f"{BAR}F0000 00:00:1717141650.890307    9276 runtime_client.cc:48] {said}\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == (cause, ())
    assert said in first.summary
