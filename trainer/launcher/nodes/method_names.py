"""Make the method names in torch's rendezvous records cheap.

    name_methods_cheaply()        # in a launcher, before its rendezvous

torch records each step of a rendezvous, and each heartbeat, with the name of the method that does it. It finds the name
by formatting every stack frame twice, for which Python searches all modules: up to one second of CPU per launch in a
process with torch. The frame's code object has the name.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

__all__ = ["name_methods_cheaply"]


def name_methods_cheaply() -> None:
    """Replace torch's function in this process."""
    dynamic_rendezvous.get_method_name = _method_name


def _method_name(depth: int = 2) -> str:
    """Name of the function `depth` calls above, with the default of torch's `get_method_name`."""
    try:
        return sys._getframe(depth).f_code.co_name
    except ValueError:
        return "no_method_name"
