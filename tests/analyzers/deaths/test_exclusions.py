"""Excluded devices and nodes: one finding each, with the reason."""

from __future__ import annotations

from analyzers.deaths.exclusions import exclusions
from analyzers.finding import Finding
from analyzers.scope import Scope
from tests.analyzers.judged import checked
from tests.analyzers.memory_store import MemoryStore


def analyze(store: MemoryStore) -> list[Finding]:
    return checked(exclusions(store, Scope()))


def test_a_device_and_a_node() -> None:
    store = MemoryStore()
    assert analyze(store) == []
    store.event(
        "excluded", attempt=1, node_rank=0, device="cuda:2", excluded_rank=2, failures=3, reason="3 deaths by a signal"
    )
    store.event("excluded", attempt=2, node_rank=1, device=None, excluded_rank=None, failures=6, reason="6 failures")
    device, node = analyze(store)
    assert (device.kind, device.status, device.ranks, device.cause) == ("excluded", "fired", (2,), "device")
    assert device.summary == "Device cuda:2 of node 0 was excluded after attempt 1: 3 deaths by a signal."
    assert (node.ranks, node.cause, node.attempt) == ((), "node", 2)
    assert node.summary == "Node 1 was excluded after attempt 2: 6 failures."
    assert node.evidence == {"node_rank": 1, "device": None, "num_failures": 6}


def test_a_damaged_event_breaks_nothing() -> None:
    store = MemoryStore()
    store.event("excluded", attempt=0, node_rank="x", device=3)
    (finding,) = analyze(store)
    assert finding.summary == "Node -1 was excluded after attempt 0: no reason was recorded."
