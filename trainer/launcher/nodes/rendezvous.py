"""Rendezvous of the nodes of a run: torch's c10d rendezvous, and agreement on the run's folder through its store.

    rendezvous = NodeRendezvous(node, rejoin_s=30.0)       # connects; the node at the endpoint keeps the store
    path = rendezvous.agree_on_run(lambda: make_a_run())   # node 0 creates it, the others get its path
    rendezvous.handler                                     # for the agent

The store lives in the launcher at the endpoint. If that node dies, no further rendezvous is possible, and the others
end at their next restart: choose a node that will not be preempted. `--resume` with another endpoint continues the run
(docs/operations.md).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousHandler
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from trainer.launcher.loopback_store import loopback_store
from trainer.launcher.node import Node, NodeRendezvousError
from trainer.launcher.nodes.endpoint import await_endpoint, host_and_port
from trainer.launcher.nodes.host_address import gloo_interface, is_own, own_address
from trainer.launcher.nodes.method_names import name_methods_cheaply
from trainer.launcher.nodes.rendezvous_handler import ResponsiveHandler
from trainer.launcher.nodes.round_stores import give_each_round_a_store
from trainer.launcher.nodes.safe_state import SafeStateBackend
from trainer.torch_compat import Store

__all__ = ["NodeRendezvous"]

JOIN_S = 900
"""Seconds that a launch waits for the minimum number of nodes, which schedulers may start minutes apart."""
HEARTBEAT_S = 2
HEARTBEATS_MISSED = 3
"""Number of missed heartbeats after which a node counts as lost."""
_RUN, _NUM_NODES = "rankscope/run", "rankscope/num-nodes"


class NodeRendezvous:
    """One node's view of the rendezvous."""

    def __init__(self, node: Node, *, rejoin_s: float) -> None:
        self.node = node
        if node.max_nodes > 1:
            give_each_round_a_store()
        many = node.max_nodes > 1
        host, port = host_and_port(node.endpoint) if many else ("localhost", 0)
        address = own_address(host, port) if many else None
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := gloo_interface(address)):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        # If launchers share a machine, torch lets the first one host the store. Only node 0, which never leaves, may.
        shared = host in ("localhost", "127.0.0.1")
        is_host = many and (node.rank == 0 if shared else is_own(host))
        host_option = {"is_host": str(is_host)} if many else {}
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=node.endpoint,
            run_id="rankscope",
            min_nodes=node.min_nodes,
            max_nodes=node.max_nodes,
            local_addr="localhost" if shared else address,
            timeout=JOIN_S,
            last_call_timeout=rejoin_s,
            keep_alive_interval=HEARTBEAT_S,
            keep_alive_max_attempt=HEARTBEATS_MISSED,
            **host_option,
        )
        name_methods_cheaply()
        if many and not is_host:
            await_endpoint(node.endpoint)
        try:
            backend, self._store = _connected(parameters, may_follow=not shared) if many else _own(parameters)
        except (RendezvousError, ValueError) as error:
            reason = str(error.__cause__ or error).partition("\n")[0]  # torch's message only refers to its cause
            raise NodeRendezvousError(f"--rdzv-endpoint {node.endpoint}: {reason[:200]}") from None
        handler = create_handler(self._store, SafeStateBackend(backend), parameters)
        if not many:  # the launcher also hosts the store of the ranks
            handler._create_tcp_store_server = lambda *_: loopback_store()  # type: ignore[method-assign]
        self.handler: RendezvousHandler = ResponsiveHandler(handler, node.endpoint) if many else handler

    def agree_on_run(self, make: Callable[[], Path]) -> Path:
        """Return the run's folder, the same on all nodes.

        Raises NodeRendezvousError if the nodes disagree on their number, node 0 does not join, or the folder is not
        shared.
        """
        own = f"{self.node.min_nodes}:{self.node.max_nodes}"
        first = self._store.compare_set(_NUM_NODES, "", own).decode()
        if first != own:
            raise NodeRendezvousError(
                f"--nnodes {own}: the first node of {self.node.endpoint} has --nnodes {first}; all nodes need the same."
            )
        if self.node.rank == 0 and not self._store.check([_RUN]):
            self._store.set(_RUN, str(make().resolve()))
        try:
            self._store.wait([_RUN], timedelta(seconds=JOIN_S))
        except RuntimeError:
            raise NodeRendezvousError(
                f"--rdzv-endpoint {self.node.endpoint}: node 0 did not join within {JOIN_S} s."
            ) from None
        path = Path(self._store.get(_RUN).decode())
        if not path.is_dir():
            raise NodeRendezvousError(f"{path} is not on this node. The nodes of a run must share its folder.")
        check_owner(path)
        return path


def check_owner(run_path: Path) -> None:
    """Raise NodeRendezvousError unless only this user can write the folder.

    The folder's path came over the network, and the configuration in it names programs that will be run.
    """
    found = run_path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NodeRendezvousError(
            f"{run_path}: the rendezvous names this folder, and other users can write it (owner {found.st_uid}, "
            f"mode {stat.S_IMODE(found.st_mode):o}). A run's folder must belong to the user of all nodes, mode 0700."
        )


def _own(parameters: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """The store of a single node, which only this machine can reach."""
    store = loopback_store()
    return C10dRendezvousBackend(store, parameters.run_id), store


def _connected(parameters: RendezvousParameters, *, may_follow: bool) -> tuple[C10dRendezvousBackend, Store]:
    """Host the store, or connect to it. If several launchers are on the endpoint's machine, only one can host it; with
    `may_follow` the others connect."""
    try:
        return create_backend(parameters)
    except RendezvousError:
        if not may_follow or not parameters.get_as_bool("is_host"):
            raise
    parameters.config["is_host"] = "False"
    return create_backend(parameters)
