"""Identity of a process within its launch, from the variables of torchrun, Rankscope or Slurm, or an existing group.

identity = Identity.from_environment()
identity.rank, identity.world_size, identity.node_rank
identity.launch()            # "torchrun-none-4711-88123-0": the same text on all ranks of this life of the group
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Rank, world size and node of a process."""

    rank: int
    local_rank: int
    world_size: int
    node_rank: int
    restarts: int
    attempt: int
    """As `rankscope train` claimed it; -1 under another launcher."""

    @classmethod
    def from_environment(cls) -> Identity:
        """Read torchrun's variables, else Slurm's; a single process without either."""

        def number(default: int, *names: str) -> int:
            return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), default)

        slurm = "SLURM_PROCID" in os.environ and "RANK" not in os.environ and "SLURM_STEP_ID" in os.environ
        return cls(
            rank=number(0, "SLURM_PROCID" if slurm else "RANK"),
            local_rank=number(0, "SLURM_LOCALID" if slurm else "LOCAL_RANK"),
            world_size=number(1, "SLURM_NTASKS" if slurm else "WORLD_SIZE"),
            node_rank=number(0, "RANKSCOPE_NODE_RANK", "SLURM_NODEID" if slurm else "GROUP_RANK"),
            restarts=number(0, "TORCHELASTIC_RESTART_COUNT"),
            attempt=number(-1, "RANKSCOPE_ATTEMPT"),
        )

    def in_group(self) -> Identity:
        """This, corrected by the default process group if there is one: `mp.spawn` sets no variables."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return self
        rank, size = dist.get_rank(), dist.get_world_size()
        local = self.local_rank if "LOCAL_RANK" in os.environ or "SLURM_LOCALID" in os.environ else rank
        return replace(self, rank=rank, world_size=size, local_rank=local)

    def is_one_node(self) -> bool:
        """Return True if all ranks have the same parent process, or the launcher gives no other sign."""
        environment = os.environ
        if "LOCAL_WORLD_SIZE" in environment:
            return int(environment["LOCAL_WORLD_SIZE"]) == self.world_size
        return int(environment.get("SLURM_NNODES", "1")) == 1

    def node_size(self) -> int | None:
        """Ranks that the launcher starts on this node; None where it does not tell."""
        given = os.environ.get("LOCAL_WORLD_SIZE", "")
        if given.isdecimal():
            return int(given)
        return self.world_size if self.is_one_node() else None

    def job(self) -> str:
        """A name of the launch that each rank finds by itself, the same over the launcher's restarts.

        On one node it is the parent of all ranks, which no other process of that start time has been. Over several it
        is what the launcher calls the job.
        """
        if self.is_one_node():
            pid = os.getppid() if self.world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
            return f"{socket.gethostname()}-{pid}-{_start_ticks(pid)}"
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
        where = f"{os.environ.get('MASTER_ADDR')}-{os.environ.get('MASTER_PORT')}"
        return f"{job}-{os.environ.get('SLURM_STEP_ID', '')}-{where}" if job != "none" else where


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where /proc does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
