"""Rendezvous stores of a single-machine launch that listen only on loopback (torch's listen on all interfaces).

store = loopback_store()
with torch_stores_on_loopback(): torchrun(options)      # applies to stores that torch creates in this process
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from trainer.torch_compat import TCPStore

__all__ = ["loopback_store", "torch_stores_on_loopback"]

TIMEOUT_S = 60
_BACKLOG = 1024  # all ranks of a node connect at once


def loopback_store() -> TCPStore:
    """Create a store at a free port of 127.0.0.1, hosted by this process."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(_BACKLOG)
        port = listening.getsockname()[1]
        return TCPStore(
            "127.0.0.1", port, is_master=True, multi_tenant=True, wait_for_workers=False,
            timeout=timedelta(seconds=TIMEOUT_S), master_listen_fd=listening.detach(), use_libuv=False,
        )  # fmt: skip


@contextmanager
def torch_stores_on_loopback() -> Iterator[None]:
    """Make torch's rendezvous create its stores (for rendezvous and ranks) on loopback."""
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (c10d_rendezvous_backend, "_create_tcp_store", lambda parameters: loopback_store()),
        (DynamicRendezvousHandler, "_create_tcp_store_server", lambda handler, address, port: loopback_store()),
    )
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)
