"""One late host is told from hosts that are all as late, by where they spend their time and by their leads."""

from __future__ import annotations

from typing import Any

import pytest

from analyzers.stragglers.comparison.device_or_host import is_late_as_peers
from analyzers.stragglers.comparison.peer_comparison import Straggler
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.plain_run import BEGIN_NS, MS

SLOW = Straggler(
    rank=0, cause="compute", segments=(), first_step=41, last_step=89, factor=1.3, excess_ms=6.6, step_ms=44.0,
    step_without_ms=37.4, phase_factors={}, phase_excess_ms={}, peers_wait_more_ms=6.6, num_steps=49, ongoing=True,
)  # fmt: skip


def hosts(*, peer_sleeps_ms: float, peer_blocked_ms: float, lead_ms: float, every: int = 1) -> MemoryStore:
    """From step 41 on the host of rank 0 sleeps for 30 ms before each forward pass, and that of rank 1 as given.

    `peer_blocked_ms`: what it waits in backward for a full launch queue. Before, all hosts are 90 ms ahead of devices
    whose steps take 37 ms. In every k-th step they read the loss, and are ahead by nothing in the step that follows.
    """
    steps: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    start_ns = BEGIN_NS
    for step in range(20, 90):
        took_ms = 37.0 if step < SLOW.first_step else 44.0
        for rank in (0, 1):
            sleep_ms, blocked_ms, ahead_ms = 0.0, 0.0, 90.0
            if step >= SLOW.first_step:
                sleep_ms = peer_sleeps_ms if rank else 30.0
                blocked_ms, ahead_ms = (peer_blocked_ms, lead_ms) if rank else (0.0, 18.0)
            if every > 1 and step % every == 0:
                ahead_ms = 0.0
            place = {"attempt": 0, "rank": rank, "step": step}
            steps.append(place | {"start_ns": start_ns, "duration_ns": round(took_ms * MS)})
            at = start_ns + round(sleep_ms * MS)
            for kind, ms in (("forward", 4.0), ("backward", 8.0 + blocked_ms), ("optimizer", 1.0)):
                spans.append(place | {"kind": kind, "start_ns": at, "end_ns": at + round(ms * MS)})
                at += round(ms * MS)
            call = {"attempt": 0, "rank": rank, "enqueue_ns": start_ns, "seq": step}
            calls.append(call | {"kernel_start_ns": start_ns + round(ahead_ms * MS)})
        start_ns += round(took_ms * MS)
    store = MemoryStore()
    for table, rows in (("steps", steps), ("spans", spans), ("nccl_calls", calls)):
        store.add(table, rows)
    return store


def late_as_peers(store: MemoryStore) -> bool:
    return is_late_as_peers(store, 0, SLOW, [0, 1])


def test_hosts_that_sleep_in_the_same_place_are_as_late_though_one_keeps_its_lead() -> None:
    """Both take as long as a step of the slower device, so the lead of the other neither grows nor is spent."""
    assert late_as_peers(hosts(peer_sleeps_ms=30, peer_blocked_ms=0, lead_ms=76))


def test_a_peer_that_waits_for_its_full_launch_queue_is_not_late() -> None:
    assert not late_as_peers(hosts(peer_sleeps_ms=0, peer_blocked_ms=30, lead_ms=88))


def test_a_peer_with_a_shrinking_lead_counts_as_late_wherever_it_spends_its_time() -> None:
    assert late_as_peers(hosts(peer_sleeps_ms=28, peer_blocked_ms=4, lead_ms=40))
    assert not late_as_peers(hosts(peer_sleeps_ms=28, peer_blocked_ms=4, lead_ms=88))


@pytest.mark.parametrize(("every", "expected"), [(3, True), (1, False)])
def test_hosts_that_read_their_loss_in_every_third_step_have_a_lead_to_lose(every: int, expected: bool) -> None:
    """Those that read it in each step are never a whole step ahead, and wait for the slow rank there."""
    store = hosts(peer_sleeps_ms=30, peer_blocked_ms=0, lead_ms=76, every=every)
    if every == 1:
        store.connection.execute(f"UPDATE nccl_calls SET kernel_start_ns = enqueue_ns + {20 * MS}")
    assert late_as_peers(store) is expected


def test_without_calls_nothing_is_excused() -> None:
    store = hosts(peer_sleeps_ms=30, peer_blocked_ms=0, lead_ms=76)
    store.drop("nccl_calls")
    assert not late_as_peers(store)
