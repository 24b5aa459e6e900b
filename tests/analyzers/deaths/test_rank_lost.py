from __future__ import annotations

import signal

import pytest

from analyzers.finding import Finding
from analyzers.memory.allocator_message import memory_of_message, others_hold_it
from analyzers.report.wording.explained import next_step, why
from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_hangs, judged_losses
from tests.analyzers.standstill import World

POLICY = StallPolicy()


def lost(world: World, now_ns: int | None = None) -> list[Finding]:
    assert judged_hangs(world.store, POLICY, now_ns) == []
    return judged_losses(world.store, POLICY, now_ns)


def killed(rank: int = 2, name: str = "SIGKILL", code: int = -9) -> World:
    """A rank dies of a signal; the others' collectives break."""
    world = World()
    for other in set(world.ranks) - {rank}:
        world.enter(other)
        world.event("exception", 0.03, rank=other, type="RuntimeError",
                    message="[pair.cc:500] Connection closed by peer [127.0.0.1]:9")  # fmt: skip
    world.event("rank_exit", 0.1, exit_rank=rank, exit_code=code, signal=name, pid=7, message="")
    return world


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", -9), ("SIGSEGV", -11), ("SIGABRT", -6)])
def test_a_signal_names_its_rank_and_the_others_are_victims(name: str, code: int) -> None:
    (finding,) = lost(killed(2, name, code))
    assert (finding.kind, finding.cause, finding.ranks) == ("rank_lost", "signal", (2,))
    assert finding.evidence["victims"] == [0, 1, 3]
    assert name in finding.summary
    assert finding.severity == "critical"


def test_a_killed_rank_is_told_with_the_phase_that_it_had_ended_last() -> None:
    """A loop that makes its batches itself shows nothing between an update and the next pass of its model."""
    world = killed(2)
    world.span(2, "optimizer", end_ns=world.now_ns + 1)
    (finding,) = lost(world)
    assert f"at step {world.step} in user code after optimizer" in finding.summary


def test_an_exception_is_the_root_and_the_errors_of_the_others_are_not() -> None:
    world = World()
    for other in (0, 1, 2):
        world.enter(other)
        world.event("exception", 0.01 * other, rank=other, type="DistBackendError", message="Connection reset by peer")
    world.event("exception", 0.05, rank=3, type="ValueError", message="bad sample\nmore", traceback="...")
    for rank in range(4):
        world.event("rank_exit", 0.2, exit_rank=rank, exit_code=1, signal=None, pid=1, message="")
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("exception", (3,))
    assert "ValueError: bad sample" in finding.summary
    assert "more" not in finding.summary


@pytest.mark.parametrize("ended", [4, 3])
def test_ranks_that_all_ended_with_code_0_are_not_lost_though_none_closed_its_records(ended: int) -> None:
    world = World()
    for rank in range(ended):
        world.event("rank_exit", 0.1 * rank, exit_rank=rank, exit_code=0, signal=None, pid=1, message="")
    found = judged_losses(world.store, POLICY)
    assert bool(found) == (ended < 4)  # where one is missing, it is asked for


def test_the_same_exception_everywhere_is_one_finding() -> None:
    world = World()
    for rank in range(4):
        world.event("exception", 0.1, rank=rank, type="KeyError", message="'lr'")
    (finding,) = lost(world)
    assert finding.ranks == (0, 1, 2, 3)
    assert "ended because of it" not in finding.summary


def test_a_script_that_failed_before_it_trained_was_not_between_steps() -> None:
    world = World(ranks=2)
    for table in ("steps", "collectives"):
        world.store.connection.execute(f"DELETE FROM {table}")
    for rank in range(2):
        world.event("exception", 0.1, rank=rank, type="ModuleNotFoundError", message="no x")
    (finding,) = judged_losses(world.store, POLICY)
    assert finding.summary == "Ranks 0 and 1 died of ModuleNotFoundError: no x before the first step."


def test_watch_alone_saw_it() -> None:
    world = World()
    for other in (0, 1, 3):
        world.enter(other)
    world.event("rank_state", 0.8, state_rank=2, state="dead", os_state="")
    assert lost(world, world.after(1.0)) == []
    (finding,) = lost(world, world.after(2.5))
    assert (finding.cause, finding.ranks) == ("vanished", (2,))


def test_processes_that_the_agent_ended_are_collateral() -> None:
    world = killed(1)
    for rank in range(4):
        world.event("rank_state", 0.9, state_rank=rank, state="dead", os_state="")
    (finding,) = lost(world)
    assert finding.ranks == (1,)


def test_two_faults_at_once_are_two_findings() -> None:
    world = killed(1)
    world.event("rank_exit", 0.1, exit_rank=3, exit_code=-11, signal="SIGSEGV", pid=9, message="")
    world.store.connection.execute("DELETE FROM events WHERE kind = 'exception' AND rank = 3")
    assert {f.ranks: f.evidence["signal"] for f in lost(world)} == {(1,): "SIGKILL", (3,): "SIGSEGV"}


def test_a_run_killed_whole_is_explained() -> None:
    world = World()
    for rank in (0, 2):
        world.enter(rank)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("killed_all", ())  # of a disk without space there is no more either
    assert "Records incomplete: all 4 ranks stopped at step 16" in finding.summary
    assert "killed from outside, or the disk took no records" in finding.summary


def test_a_run_that_may_be_alive_is_not_declared_dead() -> None:
    world = World()
    assert lost(world, world.after(0.5)) == []


def test_while_a_run_lives_an_exit_with_code_0_counts_once_the_others_have_not_followed() -> None:
    world = World()
    world.event("rank_exit", 0.1, exit_rank=1, exit_code=0, signal=None, pid=1, message="")
    assert lost(world, world.after(5.0)) == []
    (finding,) = lost(world, world.after(12.0))
    assert (finding.cause, finding.ranks) == ("exit", (1,))


def test_the_agents_sigterm_to_all_is_a_termination() -> None:
    world = World()
    for rank in range(4):
        world.event("rank_exit", 0.1, exit_rank=rank, exit_code=-15, signal="SIGTERM", pid=1, message="")
    (finding,) = lost(world)
    assert finding.cause == "ended_from_outside"
    assert "terminated from outside" in finding.summary


@pytest.mark.parametrize(
    ("exit_code", "how"),
    [
        (143, "its launcher got SIGTERM"),
        (128 + signal.SIGRTMIN + 9, "its launcher got SIGRTMIN+9"),
        (1, "its launcher was interrupted"),
        (255, "its launcher was interrupted"),
    ],
)
def test_a_job_whose_launcher_was_interrupted_lacks_no_records(exit_code: int, how: str) -> None:
    """Ranks of a script that handles no signal leave no record of their end."""
    world = World()
    world.store.event("run_ended", wall_ns=world.after(1), reason="interrupted", exit_code=exit_code)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("ended_from_outside", (0, 1, 2, 3))
    assert f"The job was ended from outside at step 16: {how}" in finding.summary


def test_a_past_attempts_death_counts_and_says_how_it_went_on() -> None:
    world = killed(2)
    World(attempt=1, first_step=11, store=world.store, start_ns=world.after(5))
    world.store.event("run_ended", attempt=1, wall_ns=world.after(60), reason="finished", exit_code=0)
    (finding,) = lost(world)
    assert (finding.attempt, finding.ranks, finding.severity) == (0, (2,), "warning")
    assert "Restarted as attempt 1 from step 11." in finding.summary


def test_clocks_of_two_nodes_that_disagree_change_nothing() -> None:
    world = World(clock_offset_ns={2: 600 * 10**9, 3: 600 * 10**9})
    for other in (0, 2, 3):
        world.enter(other)
    world.event("rank_exit", 0.1, exit_rank=1, exit_code=-9, signal="SIGKILL", pid=7, message="")
    (finding,) = lost(world)
    assert finding.ranks == (1,)


def test_missing_events_are_said() -> None:
    world = World()
    world.store.drop("events")
    assert [f.status for f in judged_losses(world.store, POLICY)] == ["insufficient_data"]  # not: everybody was killed
    world.store.drop("steps")
    assert [f.status for f in judged_losses(world.store, POLICY)] == ["insufficient_data"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("MemoryError", ""),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (
            "RuntimeError",
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes",
        ),
    ],
)
def test_a_refused_allocation_is_out_of_memory_with_its_history(error: str, message: str) -> None:
    world = World()
    world.event("exception", 0.01, rank=1, type=error, message=message)
    for other in (0, 2, 3):
        world.enter(other)
        world.event("exception", 0.05, rank=other, type="RuntimeError", message="Connection closed by peer")
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("out_of_memory", (1,))
    assert finding.advice == "rank-lost-out_of_memory"
    assert finding.evidence.keys() >= {"memory_first_bytes", "memory_last_bytes", "memory_of_peers_bytes"}


def _out_of_cuda_memory(**changed: object) -> Finding:
    """Rank 1 asked for 8 MiB in vain and wrote its snapshot."""
    world = World()
    world.event("exception", 0.01, rank=1, type="OutOfMemoryError",
                message="CUDA out of memory. Tried to allocate 8.00 MiB")  # fmt: skip
    world.event("memory_snapshot", 0.02, rank=1, **{
        "path": "memory/attempt-0/rank-00001-memory.json.gz", "bytes": 900, "device": 1, "reserved_bytes": 40 << 20,
        "allocated_bytes": 34 << 20, "unused_bytes": 6 << 20, "requested_bytes": None, "device_free_bytes": 3 << 20,
        "asked_at": "gpt/mlp.py:31 in forward", "has_stacks": True, "is_at_failure": True,
        "sites": [{"at": "", "bytes": 24 << 20, "blocks": 3},
                  {"at": "gpt/attention.py:88 in forward", "bytes": 10 << 20, "blocks": 1}],
    } | changed)  # fmt: skip
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("out_of_memory", (1,))
    return finding


def test_a_snapshot_says_what_the_memory_was_used_for() -> None:
    finding = _out_of_cuda_memory()
    assert finding.evidence["memory_snapshot"] == "memory/attempt-0/rank-00001-memory.json.gz"
    assert finding.evidence["requested_bytes"] == 8 << 20, "from the message, where the trace has none"
    assert finding.evidence["largest_allocations"] == [
        "without a Python stack: 24 MiB in 3 blocks", "gpt/attention.py:88 in forward: 10 MiB in 1 block",
    ]  # fmt: skip
    assert why(finding) == (
        "Largest in use: without a Python stack: 24 MiB in 3 blocks, 6 MiB of 40 MiB cached and unused."
    )
    assert next_step(finding).startswith("Check gpt/attention.py:88 in forward, and the memory of rank 1 over")


FULL_OF_OTHERS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 512.00 MiB is "
    "free. Process 4711 has 60.00 GiB memory in use. Process 4712 has 10.00 GiB memory in use. Including non-PyTorch "
    "memory, this process has 8.60 GiB memory in use. Of the allocated memory 5.00 GiB is allocated by PyTorch, and "
    "2.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


ITSELF = (
    "CUDA out of memory. Tried to allocate 2.94 GiB. GPU 2 has a total capacity of 79.10 GiB of which 1.21 GiB is "
    "free. {holders} Of the allocated memory 71.02 GiB is allocated by PyTorch, and 5.31 GiB is reserved by PyTorch "
    "but unallocated."
)


@pytest.mark.parametrize(
    ("holders", "others"),
    [
        ("Process 41210 has 77.88 GiB memory in use.", None),
        ("Process 7 has 1.20 GiB memory in use. Process 41210 has 76.68 GiB memory in use.", 1.2),
    ],
)
def test_a_process_that_is_listed_among_the_others_in_a_container_is_the_rank_itself(
    holders: str, others: float | None
) -> None:
    """Another process cannot hold what torch has reserved in this one: the device has no room for both."""
    found = memory_of_message(ITSELF.format(holders=holders))
    assert others_hold_it(found) is False
    assert found.get("others_bytes") == (None if others is None else round(others * 2**30))
    assert found["own_bytes"] > found["reserved_bytes"]
    assert next_step(_raised(ITSELF.format(holders=holders))).startswith("Set PYTORCH_CUDA_ALLOC_CONF")


def test_a_holder_of_a_known_number_is_the_rank_itself_however_little_it_holds() -> None:
    text = "Tried to allocate 2.00 GiB. Process 11 has 40.00 GiB memory in use. Process 12 has 9.00 GiB memory in use."
    found = memory_of_message(text, own_pids={11})
    assert (found["own_bytes"], found["others_bytes"]) == (40 * 2**30, 9 * 2**30)
    assert memory_of_message(text)["others_bytes"] == 49 * 2**30


def _raised(message: str, error: str = "OutOfMemoryError") -> Finding:
    world = World()
    world.event("exception", 0.01, rank=1, type=error, message=message)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("out_of_memory", (1,))
    return finding


def test_other_processes_that_fill_the_device_are_named_and_no_fragmentation_is() -> None:
    finding = _raised(FULL_OF_OTHERS)
    assert finding.evidence["holders"] == ["process 4711: 60 GiB", "process 4712: 10 GiB"]
    assert "Other processes hold 70 GiB of the device's 79.1 GiB: process 4711 with 60 GiB" in finding.summary
    assert next_step(finding).startswith("End or move the other processes on that device: process 4711 with 60 GiB")


def test_what_a_process_holds_itself_is_not_laid_to_the_others() -> None:
    own = FULL_OF_OTHERS.replace("60.00 GiB", "1.00 GiB").replace("10.00 GiB", "0.50 GiB").replace("8.60", "77.10")
    finding = _raised(own)
    assert "Other processes hold" not in finding.summary
    assert "expandable_segments" in next_step(finding), "the cache had 2.5 GiB, in parts below 2 GiB"
    assert "expandable_segments" not in next_step(_raised(own.replace("2.50 GiB is", "100.00 MiB is")))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_a_library_without_memory_is_out_of_memory(message: str) -> None:
    assert "outside of torch's cache" in next_step(_raised(message, "RuntimeError"))


def test_the_message_and_not_the_unwound_snapshot_says_what_was_in_use() -> None:
    message = FULL_OF_OTHERS.replace("5.00 GiB", "60.00 GiB")
    world = World()
    world.event("exception", 0.01, rank=1, type="OutOfMemoryError", message=message)
    world.event("memory_snapshot", 0.02, rank=1, path="memory/x.json.gz", allocated_bytes=400 << 20,
                reserved_bytes=62 << 30, unused_bytes=5 << 29, requested_bytes=None, has_stacks=True,
                is_at_failure=False,
                sites=[{"at": "gpt/attention.py:88 in forward", "bytes": 10 << 20, "blocks": 1}])  # fmt: skip
    (finding,) = lost(world)
    assert (finding.evidence["allocated_bytes"], finding.evidence["unused_bytes"]) == (60 << 30, 5 << 29)
    assert "largest_site" not in finding.evidence


def test_a_cache_that_had_the_bytes_is_fragmented() -> None:
    assert "expandable_segments" in next_step(_out_of_cuda_memory(unused_bytes=8 << 20))


def test_what_a_snapshot_does_not_have_is_not_made_up() -> None:
    finding = _out_of_cuda_memory(unused_bytes=None, has_stacks=False, asked_at="", sites="damaged")
    assert finding.evidence["unused_bytes"] is None
    assert "largest_allocations" not in finding.evidence
    assert why(finding).startswith("OutOfMemoryError: CUDA out of memory")
    assert next_step(finding).startswith("Compare the memory of rank 1")


def test_sigkill_is_out_of_memory_only_where_the_kernel_counted_one() -> None:
    world = World()
    world.event("rank_exit", 0.1, exit_rank=2, exit_code=-9, signal="SIGKILL", pid=7, message="",
                out_of_memory="memory limit of the control group")  # fmt: skip
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("out_of_memory", (2,))
    assert "memory limit of the control group exhausted" in finding.summary
    assert lost(killed(2))[0].cause == "signal"


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5026."


def traced(path: str, error: str, line: int = 12, function: str = "read", *, before: str = "") -> str:
    return (
        f"{before}Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 140, in main\n    step()\n'
        f'  File "{path}", line {line}, in {function}\n    do()\n    ^^^^\n{error}\n'
    )


OWN_ERRORS = [
    ("JSONDecodeError", "Unterminated string starting at: line 1 column 9 (char 8)",
     "/usr/lib/python3.11/json/decoder.py"),
    ("ReadTimeoutError", "AWSHTTPSConnectionPool(host='s3', port=443): Read timed out.",
     "/x/site-packages/urllib3/response.py"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer", "/home/me/data/shards.py"),
    ("BrokenPipeError", "[Errno 32] Broken pipe", "/home/me/data/shards.py"),
    ("TimeoutError", "[Errno 110] Connection timed out", "/home/me/data/shards.py"),
    ("RuntimeError", "DataLoader timed out after 60 seconds", "/x/site-packages/torch/utils/data/dataloader.py"),
    ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Terminated. ",
     "/x/site-packages/torch/utils/data/_utils/signal_handling.py"),
]  # fmt: skip


@pytest.mark.parametrize("has_traceback", [True, False])
@pytest.mark.parametrize("in_call", [False, True])
@pytest.mark.parametrize(("error", "message", "path"), OWN_ERRORS)
def test_words_alone_make_no_error_collateral(
    error: str, message: str, path: str, in_call: bool, has_traceback: bool
) -> None:
    world = World()
    trace = {"traceback": traced(path, f"{error}: {message}")} if has_traceback else {}
    if in_call:
        world.enter(2, is_async=True)  # gradients of the step before may still be on their way
    world.event("exception", 0.01, rank=2, type=error, message=message, **trace)
    for other in (0, 1, 3):
        world.enter(other)
        world.event("exception", 0.03, rank=other, type="RuntimeError", message=GLOO,
                    traceback=traced("/home/me/train.py", f"RuntimeError: {GLOO}"))  # fmt: skip
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("exception", (2,))
    assert finding.evidence["victims"] == [0, 1, 3]
    assert f"Rank 2 died of {error}: {message.strip(' .')}" in finding.summary


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RuntimeError", GLOO),
        ("RuntimeError", "[/pytorch/gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"),
        ("DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or a network error"),
        ("DistNetworkError", "Broken pipe"),
    ],
)  # fmt: skip
def test_a_backends_error_is_collateral_also_where_the_rank_had_not_entered_yet(error: str, message: str) -> None:
    world = World()
    for other in (0, 1, 3):  # they came to their collective only after rank 2 had gone, which nobody saw yet
        world.event("exception", 0.03, rank=other, type=error, message=message)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("vanished", (2,))


def test_a_devices_error_told_by_the_backend_is_a_root() -> None:
    world = World()
    message = "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error, Cuda failure 'illegal memory access'"
    world.event("exception", 0.01, rank=1, type="DistBackendError", message=message)
    for other in (0, 2, 3):
        world.enter(other)
        world.event("exception", 0.03, rank=other, type="DistBackendError", message="NCCL: remote process exited")
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("exception", (1,))


CAUSED = "The above exception was the direct cause of the following exception:\n\n"
HANDLED = "During handling of the above exception, another exception occurred:\n\n"


def test_an_error_made_from_a_backends_error_is_collateral() -> None:
    world = killed(2)
    before = traced("/x/site-packages/torch/distributed/distributed_c10d.py", f"RuntimeError: {GLOO}") + "\n" + CAUSED
    world.store.connection.execute("DELETE FROM events WHERE rank = 0")
    world.event("exception", 0.3, rank=0, type="TrainingError", message="step failed",
                traceback=traced("/home/me/train.py", "TrainingError: step failed", before=before))  # fmt: skip
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("signal", (2,))


def test_a_barrier_in_a_finally_does_not_hide_the_error_before_it() -> None:
    world = World()
    before = traced("/home/me/data.py", "KeyError: 'tokens'") + "\n" + HANDLED
    for rank in range(4):
        world.enter(rank)
        trace = traced("/home/me/train.py", f"RuntimeError: {GLOO}", before=before if rank == 3 else "")
        world.event("exception", 0.01 * rank, rank=rank, type="RuntimeError", message=GLOO, traceback=trace)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("exception", (3,))


def test_errors_of_peers_alone_are_lost_connections_and_nobody_is_named() -> None:
    world = World()
    for rank in range(4):
        world.enter(rank)
        world.event("exception", 0.01 * (4 - rank), rank=rank, type="RuntimeError", message=GLOO)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("connection_lost", ())
    assert "4 of 4 ranks report a lost connection" in finding.summary
    assert "rank 3 first" in finding.summary
    assert "RuntimeError: [/pytorch" in why(finding)
    assert "killed" not in finding.summary
    assert "without an error" not in finding.summary


def test_ranks_that_somebody_terminated_are_told_beside_the_errors_of_the_others() -> None:
    world = World()
    for rank in (1, 2, 3):
        world.event("exception", 0.02, rank=rank, type="RuntimeError", message=GLOO)
    world.event("rank_exit", 0.1, exit_rank=0, exit_code=-15, signal="SIGTERM", pid=7, message="")
    (finding,) = lost(world)
    assert (finding.cause, finding.evidence["terminated_ranks"]) == ("connection_lost", [0])
    assert finding.summary.endswith("and rank 0 ended by SIGTERM.")


def test_ranks_that_the_agent_ended_are_not_missing() -> None:
    world = World()
    world.event("exception", 0.01, rank=1, type="RuntimeError", message=GLOO)
    for rank in (0, 2, 3):
        world.event("rank_stopped", 0.3, exit_rank=rank, pid=1, exit_code=-15)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("connection_lost", ())


def test_the_line_that_raised_is_told() -> None:
    world = World()
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/project/train.py", line 140, in main\n    run()\n'
        '  File "/home/me/project/data/shards.py", line 41, in __getitem__\n    return json.loads(x)\n'
        '  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode\n    raise\n'
        "json.decoder.JSONDecodeError: Unterminated string\n"
    )
    world.event("exception", 0.01, rank=2, type="JSONDecodeError", message="Unterminated string", traceback=trace)
    (finding,) = lost(world)
    assert finding.evidence["raised_at"] == "data/shards.py:41 in __getitem__"
    assert finding.evidence["traceback"] == [
        "json/decoder.py:355 in raw_decode", "data/shards.py:41 in __getitem__", "project/train.py:140 in main",
    ]  # fmt: skip
    assert "died of JSONDecodeError: Unterminated string (data/shards.py:41 in __getitem__)" in finding.summary
