"""Number of threads that a rank uses on its host.

threads_of_rank(config, num_ranks=8)   # in the launcher: default of OMP_NUM_THREADS
set_host_threads(device)               # in a rank: use OMP_NUM_THREADS threads, or one on a CPU
"""

from __future__ import annotations

import os

import torch

from trainer.config.config import Config

__all__ = ["set_host_threads", "threads_of_rank"]


def threads_of_rank(config: Config, num_ranks: int) -> int:
    """Default of `OMP_NUM_THREADS`. It is 1. With an optimizer on the host it is half of the host's cores, divided by
    the number of ranks on the host.

    The other half is left to data loading and to the ranks themselves.
    """
    if config.parallel.cpu_offload == "none":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // 2 // num_ranks)


def set_host_threads(device: torch.device) -> None:
    """Set the number of threads of this rank: `OMP_NUM_THREADS` if the ranks use GPUs. On a CPU it is one thread,
    because the ranks share the cores.

    OpenMP reads the variable when the launcher imports torch, often before it is set. With more threads than free cores
    the optimizer of `parallel.cpu_offload` is ten times slower, because each operation waits for the last thread.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    torch.set_num_threads(int(given) if device.type != "cpu" and given.isdecimal() and int(given) else 1)
