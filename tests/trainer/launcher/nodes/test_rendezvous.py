"""What a launch says of a rendezvous that it cannot reach."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from trainer.launcher.node import Node, NodeRendezvousError
from trainer.launcher.nodes import rendezvous
from trainer.launcher.nodes.rendezvous import NodeRendezvous


def test_the_reason_is_that_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:  # as torch does, after two minutes
        try:
            raise DistNetworkError("The client socket has timed out.\nException raised from throwTimeoutError")
        except DistNetworkError as error:
            raise RendezvousConnectionError("The connection has failed. See inner exception for details.") from error

    monkeypatch.setattr(rendezvous, "create_backend", refuse)
    node = Node(nproc=1, rank=0, min_nodes=2, max_nodes=2, endpoint="127.0.0.1:1")
    with pytest.raises(NodeRendezvousError) as refused:
        NodeRendezvous(node, rejoin_s=1.0)
    assert str(refused.value) == "--rdzv-endpoint 127.0.0.1:1: The client socket has timed out."
