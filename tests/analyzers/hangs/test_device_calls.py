"""A hang on devices: what their hosts have enqueued is not what their devices have come to."""

from __future__ import annotations

import pytest

from analyzers.run.policy import StallPolicy
from tests.analyzers.explained import explained
from tests.analyzers.judged import judged_hangs, judged_losses
from tests.analyzers.standstill import START_NS, World

GROUP = "dp[0, 1, 2, 3]"
LAST = 30


def on_devices(
    started: tuple[int, ...], *, left: tuple[int, ...] = (), enqueued: tuple[int, ...] = (0, 1, 2, 3)
) -> World:
    """All hosts of `enqueued` have made call 30; the devices of `started` are in it, those of `left` beyond it."""
    world = World()
    world.store.connection.execute("UPDATE process_groups SET recorded_by = 'nccl_plugin'")
    of_rank = {"attempt": 0, "communicator": 0, "process_group": GROUP, "is_alive": True, "created_ns": START_NS}
    world.store.add("nccl_groups", [of_rank | {"rank": rank, "members": (0, 1, 2, 3)} for rank in range(4)])
    calls = []
    for rank in enqueued:
        if rank in left:
            world.enter(rank, seq=LAST, end_ns=world.now_ns)
        else:
            world.enter(rank, seq=LAST)
        calls.append(
            {
                "attempt": 0, "rank": rank, "communicator": 0, "call": LAST, "seq": LAST, "function": "AllReduce",
                "enqueue_ns": world.now_ns, "launched_ns": world.now_ns, "channels_started": int(rank in started),
                "kernel_start_ns": world.now_ns if rank in (*started, *left) else None,
                "kernel_end_ns": world.now_ns if rank in left else None,
            }
        )  # fmt: skip
    world.store.add("nccl_calls", calls)
    return world


def hang(world: World) -> tuple[str, tuple[int, ...], str]:
    (finding,) = judged_hangs(world.store, StallPolicy(), world.after(6.0))
    assert judged_losses(world.store, StallPolicy(), world.after(6.0)) == []
    explained([finding])
    return finding.cause, finding.ranks, finding.summary


def test_a_device_that_never_started_the_call_is_stuck() -> None:
    cause, ranks, summary = hang(on_devices(started=(0, 1, 3)))
    assert (cause, ranks) == ("device_stuck", (2,))
    assert "never started all_reduce #30" in summary


def test_a_device_that_never_left_the_call_is_stuck() -> None:
    cause, ranks, summary = hang(on_devices(started=(1,), left=(0, 2, 3)))
    assert (cause, ranks) == ("device_stuck", (1,))
    assert "never finished all_reduce #30" in summary


def test_all_devices_that_never_started_the_call_are_stuck() -> None:
    cause, ranks, summary = hang(on_devices(started=(0, 3)))
    assert (cause, ranks) == ("device_stuck", (1, 2))
    assert "they never started all_reduce #30" in summary


def test_devices_that_all_stand_still_before_the_call_are_all_stuck() -> None:
    cause, ranks, _ = hang(on_devices(started=()))
    assert (cause, ranks) == ("device_stuck", (0, 1, 2, 3))


def test_all_devices_that_never_left_a_call_that_others_left_are_stuck() -> None:
    """No rank leaves an all_reduce before all have entered, so what it needed had come to all."""
    cause, ranks, _ = hang(on_devices(started=(1, 2), left=(0, 3)))
    assert (cause, ranks) == ("device_stuck", (1, 2))


def test_the_source_of_a_broadcast_leaves_before_the_others() -> None:
    world = on_devices(started=(1, 2, 3), left=(0,))
    world.store.connection.execute(f"UPDATE collectives SET op = 'broadcast' WHERE seq = {LAST}")
    cause, ranks, _ = hang(world)
    assert (cause, ranks) == ("all_entered", (1, 2, 3))


def test_a_device_is_where_its_oldest_call_is_and_not_where_its_host_is() -> None:
    """The hosts enqueue steps until their launch queues are full, so those of the call are no recent steps."""
    world = on_devices(started=(0, 1, 3))
    later = [
        world._of(rank, step=world.step + ahead, start_ns=world.now_ns + ahead, duration_ns=1)
        for rank in range(4)
        for ahead in range(1, 40)
    ]
    world.store.add("steps", later)
    cause, ranks, summary = hang(world)
    assert (cause, ranks) == ("device_stuck", (2,))
    assert f"at step {world.step}: it never started all_reduce #30" in summary


def test_a_call_that_all_ranks_entered_may_be_a_stuck_device() -> None:
    world = World()
    for rank in range(4):
        world.enter(rank)
    assert "or the device" not in hang(world)[2]
    world.store.connection.execute("UPDATE ranks SET device = 'cuda:0'")
    cause, ranks, summary = hang(world)
    assert (cause, ranks) == ("all_entered", (0, 1, 2, 3))
    assert "the network or the backend is stuck, or the device of one of them is stuck in an earlier kernel" in summary


def test_a_host_that_never_made_the_call_is_not_a_stuck_device() -> None:
    world = on_devices(started=(0, 1, 2), enqueued=(0, 1, 2))
    world.span(3, "forward")
    cause, ranks, _ = hang(world)
    assert (cause, ranks) == ("not_entered", (3,))


def test_all_devices_in_the_call_are_a_link_or_the_network() -> None:
    cause, ranks, _ = hang(on_devices(started=(0, 1, 2, 3)))
    assert (cause, ranks) == ("all_entered", (0, 1, 2, 3))


@pytest.mark.parametrize("channel", [0, 1])
def test_the_link_that_moved_least_is_named(channel: int) -> None:
    world = on_devices(started=(0, 1, 2, 3))
    links = [
        {
            "attempt": 0, "rank": rank, "communicator": 0, "channel": channel, "peer": (rank + 1) % 4, "is_send": True,
            "op_start_ns": world.now_ns, "op_call": LAST, "op_steps_done": 0 if rank == 1 else 3, "op_num_steps": 8,
        }
        for rank in range(4)
    ]  # fmt: skip
    world.store.add("nccl_links", links)
    cause, ranks, summary = hang(world)
    assert (cause, ranks) == ("all_entered", (1, 2))
    assert f"The link from rank 1 to rank 2, channel {channel}, moved the least data." in summary


def test_an_abort_by_a_watchdog_follows_another_ranks_death() -> None:
    world = on_devices(started=(0, 1, 2), enqueued=(0, 1, 2))
    message = "CUDA error: uncorrectable ECC error encountered"
    world.event("exception", 0.1, rank=3, type="RuntimeError", message=message, traceback="")
    for rank in (0, 1, 2):
        world.event("rank_exit", 5.0 + rank, exit_rank=rank, pid=rank, exit_code=-6, signal="SIGABRT", message="")
    world.event("run_ended", 9.0, reason="failed", exit_code=1, message="")
    (finding,) = judged_losses(world.store, StallPolicy(), None)
    assert (finding.cause, finding.ranks) == ("exception", (3,))
