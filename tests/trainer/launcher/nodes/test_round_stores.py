"""Nodes that come later: torch's rendezvous tells them where the ranks' store is, and all are one launch."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from probes.attach.launch.identity import LAUNCH, ROUND, Identity
from tests.waiting import wait_for
from trainer.launcher.nodes.round_stores import follow_rounds, give_each_round_a_store
from trainer.torch_compat import HashStore

SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Node:
    """A launcher's rendezvous, in a thread while it joins."""

    def __init__(self, store: HashStore) -> None:
        parameters = RendezvousParameters(
            backend="c10d", endpoint="localhost", run_id="returns", min_nodes=1, max_nodes=2, local_addr="localhost",
            last_call_timeout=1,
        )  # fmt: skip
        self.handler: DynamicRendezvousHandler = create_handler(
            store, C10dRendezvousBackend(store, "returns"), parameters
        )
        follow_rounds(self.handler)
        self._joined: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def join(self) -> None:
        def join() -> None:
            try:
                self._joined.put(self.handler.next_rendezvous())
            except Exception as error:
                self._joined.put(error)

        threading.Thread(target=join, daemon=True).start()

    def joined(self) -> RendezvousInfo:
        found = self._joined.get(timeout=120)
        assert isinstance(found, RendezvousInfo), found
        return found


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (SHARING, LAUNCH, ROUND):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    for name in (LAUNCH, ROUND):
        os.environ.pop(name, None)


@pytest.mark.usefixtures("clean")
def test_a_node_that_comes_later_learns_where_the_ranks_store_is_and_which_launch_it_is() -> None:
    """torch alone lets the later node wait for an address that is never published, until its store times out."""
    store = HashStore()
    nodes = [Node(store)]
    nodes[0].join()
    assert nodes[0].joined().world_size == 1
    first = Identity.from_environment()
    assert first.launch.startswith("returns-")
    assert first.job() == first.launch

    nodes.append(Node(store))
    rounds = {first.round}
    for _ in range(2):
        nodes[1].join()
        own = None
        while own is None or own.world_size == 1:  # on a busy machine the last call ends before the other node looks
            wait_for(lambda: nodes[0].handler.num_nodes_waiting() == 1, "the node that waits for the next round")
            nodes[0].join()
            own = nodes[0].joined()
        infos = [own, nodes[1].joined()]
        assert sorted(info.rank for info in infos) == [0, 1]
        assert infos[0].bootstrap_store_info == infos[1].bootstrap_store_info
        assert Identity.from_environment().launch == first.launch
        rounds.add(Identity.from_environment().round)
    assert len(rounds) == 3
    nodes[0].handler.shutdown()


def test_a_users_choice_of_a_store_for_each_round_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARING, "0")
    give_each_round_a_store()
    assert os.environ[SHARING] == "0"
