"""What a forked rank settles before it trains: its threads on the host, and whether it can use its GPU.

    set_host_threads(device)               # OMP_NUM_THREADS; one on a CPU
    use_device(device, arguments)          # torch.cuda.set_device, or restart as a new interpreter with the same pid

The launcher's zygote has not initialized the driver when it is forked (`trainer.launcher.processes.zygote` checks
this). If the driver refuses the forked process nevertheless, its inherited state is unusable. `exec` discards that
state and keeps pid, log files and session.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from probes.attach.launch.own_process import own_process

if TYPE_CHECKING:
    import torch  # the launcher reads `FORKED` before it imports torch

__all__ = ["FORKED", "set_host_threads", "use_device"]

FORKED = "RANKSCOPE_FORKED"
"""Environment variable of a forked rank, removed before its device is used."""


def set_host_threads(device: torch.device) -> None:
    """One thread for operations on a CPU, whose cores ranks share; beside a GPU `OMP_NUM_THREADS`.

    OpenMP read the variable when the launcher imported torch, often before it was set. More threads than free cores
    make the optimizer of `parallel.cpu_offload` ten times slower: after each operation all wait for the last.
    """
    import torch

    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    torch.set_num_threads(int(given) if device.type != "cpu" and given.isdecimal() and int(given) else 1)


def use_device(device: torch.device, arguments: Sequence[str]) -> None:
    """Make `device` the current one. Raises RuntimeError if a new interpreter cannot use it either."""
    import torch

    was_forked = os.environ.pop(FORKED, "")
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        if not was_forked:
            raise
        sys.stderr.write(f"rankscope: {device} refuses a forked process ({error}); starting over\n")
        sys.stderr.flush()
        command, environment = own_process("trainer.rank.worker", *arguments)
        os.execve(command[0], command, environment)
