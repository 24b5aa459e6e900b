"""Let nodes that join in a later rendezvous round find the ranks' store, the run and the attempt.

    follow_rounds(handler)      # torch's c10d handler, before its first round; in `rankscope run`
    give_each_round_a_store()   # in `rankscope train`, whose ranks need no store that outlives a round

torch 2.13 keeps one store for the ranks over all rounds and publishes its address only in the first: a node that joins
later waits for it until a timeout, and nodes whose leader changed keep the old address. So the first node of each round
publishes the address of the round's store, and the others read it.

Ranks find their run and attempt by themselves (`probes.attach.launch.joining`). Launchers' pids and restart counts
cannot identify a round, because after the first round they differ between nodes. So ranks are given a name for the
launch and a name for the round.
"""

from __future__ import annotations

import os
import time
import uuid

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from probes.attach.launch.identity import LAUNCH, ROUND
from trainer.torch_compat import PrefixStore

__all__ = ["follow_rounds", "give_each_round_a_store"]

_NAME = "rankscope/name"


def give_each_round_a_store() -> None:
    """Make torch open a store for the ranks in each round, unless the user has set torch's environment variable."""
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def follow_rounds(handler: RendezvousHandler) -> None:
    """Publish the ranks' store to each node, and pass the names of launch and round to the ranks in environment
    variables."""
    join = handler.next_rendezvous

    def next_rendezvous() -> RendezvousInfo:
        info = join()
        _name_round(info, handler.get_run_id())
        return _with_store_of_round(info)

    handler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]


def _with_store_of_round(info: RendezvousInfo) -> RendezvousInfo:
    store_of_ranks = info.bootstrap_store_info
    if store_of_ranks is None:
        return info
    if info.rank == 0:
        info.store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, store_of_ranks.master_addr)
        info.store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(store_of_ranks.master_port))
        return info
    found = RendezvousStoreInfo.build(info.rank, info.store, local_addr=None)
    return RendezvousInfo(info.store, info.rank, info.world_size, found)


def _name_round(info: RendezvousInfo, run_id: str) -> None:
    """Set the names of launch and round. The first node to write a name into the shared store chooses it."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    launch_store = info.store
    while isinstance(launch_store, PrefixStore):
        launch_store = launch_store.underlying_store
    given = name if run_id == "none" else f"{run_id}-{name}"
    os.environ[LAUNCH] = launch_store.compare_set(_NAME, "", given).decode()
    os.environ[ROUND] = info.store.compare_set(_NAME, "", uuid.uuid4().hex).decode()
