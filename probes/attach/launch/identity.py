"""Identity of a process within its launch, from the variables of torchrun, Rankscope or Slurm, or an existing group.

identity = Identity.from_environment()
identity.rank, identity.world_size, identity.node_rank
identity.in_group()          # corrected by the default process group
identity.job()               # the same text on all ranks of a launch
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import uuid
from dataclasses import dataclass, replace

__all__ = ["Identity", "launcher_pid"]

_SCHEDULER_VARIABLES = {
    "SLURM_PROCID": "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
}
"""Variables with the rank and the number of ranks. A wrapper around a rank has them in its environment, the launcher of
the rank does not."""
_JOB_ID_VARIABLES = ("PMIX_NAMESPACE", "KUBERNETES_JOB_UID", "JOB_UID", "LSB_JOBID", "PBS_JOBID")
_LAUNCH_KEY = "rankscope/launch"
LAUNCH = "RANKSCOPE_LAUNCH"
ROUND = "RANKSCOPE_ROUND"
"""Variables in which `rankscope run` on several nodes names the launch and its round."""
_MAX_ENVIRONMENT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Rank, world size and node of a process."""

    rank: int
    local_rank: int
    world_size: int
    node_rank: int
    restarts: int
    attempt: int
    """Attempt claimed by `rankscope train`; -1 under another launcher."""
    ranks_of_process: int = 1
    """Number of ranks that each launched process has started itself, as with `torch.multiprocessing.spawn`."""
    is_started_by_script: bool = False
    """True if this is such a rank. Its environment variables describe the process that started it."""
    launch: str = ""
    """Name of the launch. It is the same in all rounds of the launch, although nodes may join and leave between rounds;
    "" under other launchers."""
    round: str = ""
    """Name of the round; "" under other launchers."""

    @classmethod
    def from_environment(cls) -> Identity:
        """Read torchrun's variables. If they are not set, read Slurm's. Without either, this is a single process."""

        def number(default: int, *names: str) -> int:
            return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), default)

        slurm = "SLURM_PROCID" in os.environ and "RANK" not in os.environ and "SLURM_STEP_ID" in os.environ
        mpi = "OMPI_COMM_WORLD_"  # MPI's variables count only if nothing has set torch's
        return cls(
            rank=number(0, "SLURM_PROCID" if slurm else "RANK", f"{mpi}RANK"),
            local_rank=number(0, "SLURM_LOCALID" if slurm else "LOCAL_RANK", f"{mpi}LOCAL_RANK"),
            world_size=number(1, "SLURM_NTASKS" if slurm else "WORLD_SIZE", f"{mpi}SIZE"),
            node_rank=number(0, "RANKSCOPE_NODE_RANK", "SLURM_NODEID" if slurm else "GROUP_RANK"),
            restarts=number(0, "TORCHELASTIC_RESTART_COUNT"),
            attempt=number(-1, "RANKSCOPE_ATTEMPT"),
            launch=os.environ.get(LAUNCH, ""),
            round=os.environ.get(ROUND, ""),
        )

    def in_group(self) -> Identity:
        """Return the identity corrected by the default process group, if any: `mp.spawn` sets no variables."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return self
        rank, size = dist.get_rank(), dist.get_world_size()
        launched = _num_launched()
        # each launched process has started the same number of ranks
        if launched and multiprocessing.parent_process() is not None and size % launched == 0:
            per_process = size // launched
            return replace(
                self,
                rank=rank,
                world_size=size,
                local_rank=rank - self.node_rank * per_process,
                ranks_of_process=per_process,
                is_started_by_script=True,
            )
        local = self.local_rank if "LOCAL_RANK" in os.environ or "SLURM_LOCALID" in os.environ else rank
        return replace(self, rank=rank, world_size=size, local_rank=local)

    def is_one_node(self) -> bool:
        """Return True if all ranks run on one node, or if the launcher does not say otherwise."""
        environment = os.environ
        if "LOCAL_WORLD_SIZE" in environment:
            return int(environment["LOCAL_WORLD_SIZE"]) * self.ranks_of_process == self.world_size
        return int(environment.get("SLURM_NNODES", "1")) == 1

    def node_size(self) -> int | None:
        """Number of ranks that the launcher starts on this node; None if unknown."""
        given = os.environ.get("LOCAL_WORLD_SIZE", "")
        if given.isdecimal():
            return int(given) * self.ranks_of_process
        return self.world_size if self.is_one_node() else None

    def job(self) -> str:
        """Name of the launch that each rank can determine, the same across the launcher's restarts.

        On one node this is the pid and start time of the process that started all ranks. On several nodes, or in
        containers that do not see that process, it is the first of these that exists: the name that `rankscope run`
        gave, the launcher's job id if it is unique, a random word from the process group's store (not under torchrun),
        the address of the rendezvous.
        """
        if self.launch:
            return self.launch
        if self.is_one_node():
            pid = launcher_pid() if self.world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
            if pid > 0:
                return f"{socket.gethostname()}-{pid}-{_start_ticks(pid)}"
        is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # ranks that torchrun restarts get a new store
        return _name_of_job() or ("" if is_torchrun else _word_from_store()) or _rendezvous()


def launcher_pid() -> int:
    """The process that started the ranks of this node: the parent, or a wrapper's parent if each rank has a wrapper; 0
    if unknown.

    A wrapper (`srun wrapper.sh`, `conda run`) was given the rank's variables, and the launcher was not.
    """
    environment = os.environ
    is_torchrun = "TORCHELASTIC_RUN_ID" in environment
    names = ["RANK", *(["TORCHELASTIC_RUN_ID"] if is_torchrun else _scheduler_rank_variables())]
    given = {name: environment[name] for name in names if name in environment}
    pid = os.getppid()
    while given and pid > 1 and _was_given_any(pid, given):
        pid = _parent(pid)
    return 0 if pid <= 0 or (pid == 1 and _was_given_any(pid, given)) else pid


def _num_launched() -> int:
    """Number of processes that torchrun has started, if it starts one per node. 0 in all other cases.

    WORLD_SIZE is not evidence: a script that starts ranks may set it for them.
    """
    nodes, per_node = (os.environ.get(name, "") for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return int(nodes) if nodes.isdecimal() and per_node == "1" else 0


def _scheduler_rank_variables() -> list[str]:
    """Rank variables of schedulers, unless they belong to an enclosing allocation in which a launcher was started."""
    size = os.environ.get("WORLD_SIZE")
    return [rank for rank, ranks in _SCHEDULER_VARIABLES.items() if size is None or os.environ.get(ranks) == size]


def _was_given_any(pid: int, variables: dict[str, str]) -> bool:
    """Return True if the process was started with any of these variables."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = set(file.read(_MAX_ENVIRONMENT).split(b"\0"))
    except OSError:  # another user's: the daemon of a scheduler
        return False
    return any(f"{name}={value}".encode() in entries for name, value in variables.items())


def _parent(pid: int) -> int:
    return _stat(pid, 1)


def _start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if /proc does not show it."""
    return _stat(pid, 19)


def _stat(pid: int, field: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[field])
    except (OSError, IndexError, ValueError):
        return 0


def _name_of_job() -> str:
    """Job id of the launcher if it is unique to the launch, else an empty string."""
    environment = os.environ
    step = environment.get("SLURM_STEP_ID")
    if "SLURM_JOB_ID" in environment and step is not None:
        names = [environment["SLURM_JOB_ID"], step]
    elif (run_id := environment.get("TORCHELASTIC_RUN_ID", "none")) != "none":
        names = [run_id]
    else:
        names = [environment[name] for name in _JOB_ID_VARIABLES if environment.get(name)][:1]
    where = [environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environment.get(name)]
    return "-".join([*names, *where]) if names else ""


def _word_from_store() -> str:
    """Return a random word from the store of the default group. The first rank that calls this function has put it
    there, so no rank waits for another."""
    import torch.distributed as dist

    from ...torch_compat import default_store

    if not dist.is_available() or not dist.is_initialized():
        return ""
    try:
        return str(default_store().compare_set(_LAUNCH_KEY, "", uuid.uuid4().hex).decode())
    except RuntimeError:  # this store has no `compare_set`
        return ""


def _rendezvous() -> str:
    return f"{os.environ.get('MASTER_ADDR')}-{os.environ.get('MASTER_PORT')}"
