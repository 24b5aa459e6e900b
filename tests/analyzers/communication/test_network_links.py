from __future__ import annotations

from typing import Any

from analyzers.communication.network_links import network_links, slowest_link
from tests.analyzers.memory_store import MemoryStore


def links(**slow: Any) -> MemoryStore:
    """A ring of four ranks on two channels; the link from rank 1 to rank 2 differs on channel 1."""
    store = MemoryStore()
    members = (10, 11, 12, 13)
    of_rank = {"attempt": 0, "communicator": 2, "process_group": "dp:10-13", "members": members, "is_alive": True}
    store.add("nccl_groups", [of_rank | {"rank": rank} for rank in members])
    rows = []
    for place, rank in enumerate(members):
        for channel in range(2):
            row = {"attempt": 0, "rank": rank, "communicator": 2, "channel": channel, "peer": (place + 1) % 4}
            row |= {"is_send": True, "bytes": 1 << 30, "num_steps": 100, "network_wait_ns": 1 << 30}
            rows.append(row | (slow if (place, channel) == (1, 1) else {}))
            rows.append(row | {"is_send": False, "network_wait_ns": 9 << 30})  # a receiver waits for its sender
    store.add("nccl_links", rows)
    return store


def test_the_sender_that_waits_for_its_network_names_the_link() -> None:
    found = slowest_link(links(network_wait_ns=6 << 30), 0, (10, 11, 12, 13))
    assert found is not None
    assert (found.rank, found.peer, found.channel, round(found.factor, 3)) == (11, 12, 1, 6.0)
    assert found.text == "rank 11 to rank 12, channel 1"


def test_links_that_are_as_fast_as_the_others_are_not_named() -> None:
    assert slowest_link(links(), 0, (10, 11, 12, 13)) is None
    assert slowest_link(links(network_wait_ns=6 << 30), 0, (10, 11)) is None
    assert slowest_link(links(network_wait_ns=6 << 30, bytes=1 << 10), 0, (10, 11, 12, 13)) is None
    assert len(network_links(links(), 0)) == 8


def test_without_steps_nothing_is_known() -> None:
    assert network_links(MemoryStore(), 0) == []
    store = links()
    store.connection.execute("UPDATE nccl_links SET network_wait_ns = NULL, bytes = NULL")
    assert network_links(store, 0) == []
