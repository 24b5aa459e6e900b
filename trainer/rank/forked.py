"""A rank that was forked and cannot use its GPU: it starts over as a new interpreter, under the same pid.

    use_device(device, arguments)          # torch.cuda.set_device, or restart this process

The launcher's zygote has not touched the driver when it is forked (`trainer.launcher.processes.zygote` checks this).
Where a driver refuses a forked process all the same, its state is lost with the fork, and `exec` is what gets rid of
it: pid, log files and session stay.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from probes.attach.launch.own_process import own_process

if TYPE_CHECKING:
    import torch  # the launcher reads `FORKED` before it imports torch

__all__ = ["FORKED", "use_device"]

FORKED = "RANKSCOPE_FORKED"
"""Set in the environment of a rank that was forked, until its device answers."""


def use_device(device: torch.device, arguments: Sequence[str]) -> None:
    """Make `device` the current one. Raises RuntimeError where it does not answer a new interpreter either."""
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
