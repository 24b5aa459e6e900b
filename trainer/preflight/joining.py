"""Join the other ranks under any launcher: torchrun, `rankscope run`, srun, or alone.

    place = join(timeout_s=60.0)
    place.rank, place.world_size
    place.store.set("hello/0", "...")

The store is joined without waiting for all ranks, so that a missing rank can be named.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from probes.attach.launch.identity import Identity
from trainer.launcher.nodes.host_address import gloo_interface, own_address
from trainer.torch_compat import HashStore, PrefixStore, Store, TCPStore

__all__ = ["JoinError", "Place", "first_host", "is_launched", "join"]

FIRST_PORT, NUM_PORTS = 29_600, 400
"""Range of ports for srun. A job's port is chosen by its ID."""


class JoinError(RuntimeError):
    """The store of the job cannot be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank's place among all ranks, and the store that they share."""

    rank: int
    local_rank: int
    world_size: int
    store: Store


def is_launched() -> bool:
    """True if a launcher gave this process a rank."""
    return "RANK" in os.environ or ("SLURM_PROCID" in os.environ and "SLURM_STEP_ID" in os.environ)


def join(timeout_s: float) -> Place:
    """Connect to the store of the job. Raises JoinError."""
    identity = Identity.from_environment()
    if identity.world_size == 1:
        return Place(rank=0, local_rank=0, world_size=1, store=HashStore())
    host = os.environ.get("MASTER_ADDR") or first_host(os.environ.get("SLURM_STEP_NODELIST", ""))
    if not host:
        raise JoinError("MASTER_ADDR is not set: start preflight with torchrun, srun or rankscope run")
    job = int(os.environ.get("SLURM_JOB_ID", "0")) + int(os.environ.get("SLURM_STEP_ID", "0"))
    port = int(os.environ.get("MASTER_PORT") or FIRST_PORT + job % NUM_PORTS)
    address = own_address(host, port)
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := gloo_interface(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    launcher_serves_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            host, port, is_master=identity.rank == 0 and not launcher_serves_store,
            timeout=timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise JoinError(f"{host}:{port} cannot be reached: {str(error).splitlines()[0]}") from None
    prefixed = PrefixStore(f"rankscope-preflight-{identity.restarts}", store)
    return Place(rank=identity.rank, local_rank=identity.local_rank, world_size=identity.world_size, store=prefixed)


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],login` -> `gpu03`."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?", node_list)
    return f"{found[1]}{found[2] or ''}" if found else ""
