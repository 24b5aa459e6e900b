"""Number of threads that a rank uses on its host.

threads_of_rank(config, num_ranks=8)   # in the launcher: default of OMP_NUM_THREADS
set_host_threads(device)               # in a rank: OMP_NUM_THREADS; one on a CPU
"""

from __future__ import annotations

import os

import torch

from trainer.config.config import Config

__all__ = ["set_host_threads", "threads_of_rank"]


def threads_of_rank(config: Config, num_ranks: int) -> int:
    """Default of `OMP_NUM_THREADS`: with an optimizer on the host, half of its cores are shared among its ranks.

    The other half is left to data loading and to the ranks themselves: threads that wait for a core cost more time than
    they save.
    """
    if config.parallel.cpu_offload == "none":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // 2 // num_ranks)


def set_host_threads(device: torch.device) -> None:
    """One thread for operations on a CPU, whose cores ranks share; beside a GPU `OMP_NUM_THREADS`.

    OpenMP read the variable when the launcher imported torch, often before it was set. More threads than free cores
    make the optimizer of `parallel.cpu_offload` ten times slower: after each operation all wait for the last.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    torch.set_num_threads(int(given) if device.type != "cpu" and given.isdecimal() and int(given) else 1)
