"""The end of the rendezvous store: it is named, and no rank that lost its connection is."""

from __future__ import annotations

import pytest

from tests.analyzers.deaths.lost_ranks import lost, traced
from tests.analyzers.standstill import World


@pytest.mark.parametrize(
    ("error", "message"),
    [  # the first two as torch writes them where the server of a TCPStore is killed
        ("DistNetworkError", "Broken pipe"),
        ("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote "
         "server shutdown or crash?"),
        ("DistStoreError", "Connection reset by peer"),
        ("RuntimeError", "[/pytorch/torch/csrc/distributed/c10d/TCPStore.cpp:106] sendBytes failed: Broken pipe"),
        ("DistBackendError", "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
         "key-value store by key '0', but store->get('0') got error: Connection reset by peer"),
    ],
)  # fmt: skip
def test_a_lost_store_is_named_and_no_rank_is(error: str, message: str) -> None:
    world = World()
    world.store.connection.execute("UPDATE ranks SET node_rank = rank // 2, host = 'host-' || (rank // 2)")
    for rank in range(4):
        trace = traced("/x/site-packages/torch/distributed/distributed_c10d.py", f"{error}: {message}")
        world.event("exception", 0.01 * (4 - rank), rank=rank, type=error, message=message, traceback=trace)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks, finding.severity) == ("store_lost", (), "critical")
    assert finding.advice == "rank-lost-store_lost"
    assert "The rendezvous store was lost at step 16: 4 of 4 ranks" in finding.summary
    assert "It ran on node 0, host-0" in finding.summary
    assert finding.evidence["store_host"] == "host-0"
    assert finding.evidence["victims"] == [0, 1, 2, 3]


def test_a_killed_rank_that_hosted_the_store_is_the_root() -> None:
    world = World()
    for rank in (1, 2, 3):
        world.event("exception", 0.02, rank=rank, type="DistNetworkError", message="Broken pipe")
    world.event("rank_exit", 0.1, exit_rank=0, exit_code=-9, signal="SIGKILL", pid=7, message="")
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("signal", (0,))
