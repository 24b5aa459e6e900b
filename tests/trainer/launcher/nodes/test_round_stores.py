"""A node that comes back joins the next round of torch's rendezvous: it is told where the ranks' store is."""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from tests.waiting import wait_for
from trainer.launcher.nodes.round_stores import give_each_round_a_store
from trainer.torch_compat import HashStore

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def _handler(store: HashStore) -> DynamicRendezvousHandler:
    parameters = RendezvousParameters(
        backend="c10d", endpoint="localhost", run_id="returns", min_nodes=1, max_nodes=2, local_addr="localhost",
        last_call_timeout=1,
    )  # fmt: skip
    return create_handler(store, C10dRendezvousBackend(store, "returns"), parameters)


def _joins(handler: DynamicRendezvousHandler, outcome: queue.SimpleQueue[Any]) -> None:
    def join() -> None:
        try:
            outcome.put(handler.next_rendezvous())
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=join, daemon=True).start()


def test_a_node_that_comes_later_learns_where_the_ranks_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the later node waits for an address that is never published, until its store times out."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    give_each_round_a_store()
    store = HashStore()
    stays, comes = _handler(store), _handler(store)
    assert stays.next_rendezvous().world_size == 1

    later: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _joins(comes, later)
    wait_for(lambda: stays.num_nodes_waiting() == 1, "the node that waits for the next round")
    second = stays.next_rendezvous()
    joined = later.get(timeout=120)
    assert second.world_size == joined.world_size == 2
    assert joined.bootstrap_store_info == second.bootstrap_store_info
    stays.shutdown()
    comes.shutdown()


def test_a_users_value_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    give_each_round_a_store()
    assert os.environ[VARIABLE] == "0"
