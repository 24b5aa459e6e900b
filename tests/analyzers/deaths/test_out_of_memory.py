"""Ranks that ran out of memory: of the device, of the host, and who held it."""

from __future__ import annotations

import pytest

from analyzers.finding import Finding
from analyzers.memory.allocator_message import memory_of_message, others_hold_it
from analyzers.report.wording.explained import next_step, why
from tests.analyzers.deaths.lost_ranks import killed, lost
from tests.analyzers.standstill import World


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
    asked = {"RuntimeError": "it asked for 64 MiB", "OutOfMemoryError": "it asked for 2.00 GiB"}.get(error, "")
    assert asked in finding.summary
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


def test_the_misspelt_capacity_of_torch_2_1_is_read() -> None:
    text = ITSELF.format(holders="Process 41210 has 77.88 GiB memory in use.").replace("capacity", "capacty")
    assert memory_of_message(text)["device_bytes"] == round(79.1 * 2**30)
    assert next_step(_raised(text)).startswith("Set PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("reserved", ["30.50 GiB reserved in total by PyTorch", "30.50 GiB cached"])
def test_the_figures_of_torch_before_2_0_are_read(reserved: str) -> None:
    text = (
        "CUDA out of memory. Tried to allocate 512.00 MiB (GPU 3; 31.75 GiB total capacity; 27.25 GiB already "
        f"allocated; 128.00 MiB free; {reserved})"
    )
    assert memory_of_message(text) == {
        "requested_bytes": 512 << 20, "device_bytes": round(31.75 * 2**30), "allocated_bytes": round(27.25 * 2**30),
        "device_free_bytes": 128 << 20, "reserved_bytes": round(30.5 * 2**30), "unused_bytes": round(3.25 * 2**30),
    }  # fmt: skip


def test_a_process_with_the_pid_of_the_rank_is_the_rank_itself() -> None:
    text = "Tried to allocate 2.00 GiB. Process 11 has 40.00 GiB memory in use. Process 12 has 9.00 GiB memory in use."
    found = memory_of_message(text, own_pids={11})
    assert (found["own_bytes"], found["others_bytes"]) == (40 * 2**30, 9 * 2**30)
    assert memory_of_message(text)["others_bytes"] == 49 * 2**30


@pytest.mark.parametrize("uncounted", ["17179869184.00 GiB", "0 bytes", f"{'9' * 400} GiB"])
def test_memory_that_nvml_does_not_report_is_unknown(uncounted: str) -> None:
    """NVML gives -1 for a process's memory on WSL, on shared devices and without permission to account."""
    text = FULL_OF_OTHERS.replace("60.00 GiB", uncounted).replace("10.00 GiB", uncounted)
    assert not {"others_bytes", "holders"} & set(memory_of_message(text))
    found = _raised(text.replace("8.60 GiB", uncounted))
    assert "process" not in found.summary
    assert next_step(found).startswith("Set PYTORCH_CUDA_ALLOC_CONF")
    assert others_hold_it(found.evidence) is False


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


def test_memory_of_the_rank_itself_is_not_attributed_to_other_processes() -> None:
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


def test_fields_missing_from_a_snapshot_stay_unknown() -> None:
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
