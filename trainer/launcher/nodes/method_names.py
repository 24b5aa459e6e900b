"""Make the method names in torch's rendezvous records cheap.

    name_methods_cheaply()        # in a launcher, before its rendezvous

torch records each step of a rendezvous, and each heartbeat, with the name of the method that does it. It finds the name
by formatting every stack frame twice, for which Python searches all modules. In a process with torch this takes up to
one second of CPU time per launch. Here the name is read from the frame's code object.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

__all__ = ["name_methods_cheaply"]


def name_methods_cheaply() -> None:
    """Replace torch's function in this process."""
    dynamic_rendezvous.get_method_name = _method_name


def _method_name(depth: int = 2) -> str:
    """Name of the function `depth` calls up the stack. The default is the one of torch's `get_method_name`."""
    try:
        return sys._getframe(depth).f_code.co_name
    except ValueError:
        return "no_method_name"
