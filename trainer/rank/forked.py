"""Make a forked rank use its GPU.

    use_device(device, arguments)          # torch.cuda.set_device, or restart as a new interpreter with the same pid

The launcher's zygote has not initialized the driver when it is forked (`trainer.launcher.processes.zygote` checks
this). If the driver nevertheless refuses the forked process, the process's inherited state is unusable. `exec` then
discards that state, and keeps pid, log files and session.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from probes.attach.launch.own_process import own_process

if TYPE_CHECKING:
    import torch  # torch is imported late, because the launcher reads `FORKED` before it imports torch

__all__ = ["FORKED", "use_device"]

FORKED = "RANKSCOPE_FORKED"
"""Environment variable of a forked rank, removed before its device is used."""


def use_device(device: torch.device, arguments: Sequence[str]) -> None:
    """Make `device` the current device. Raises RuntimeError if a new interpreter cannot use the device either."""
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
