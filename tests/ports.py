"""Ports for servers that tests start.

port = free_port()
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_port"]

_DYNAMIC = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_CHOICE = random.SystemRandom()  # workers must not choose alike


def free_port() -> int:
    """A TCP port at which nobody listened a moment ago.

    It lies below the ports that the kernel gives to connections and to listeners on port 0: gloo takes dozens of these
    a second, and one of them could be ours before the server that the port is for has started.
    """
    above = int(_DYNAMIC.read_text().split()[0])
    for _ in range(100):
        port = _CHOICE.randrange(_LOWEST, above)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port between {_LOWEST} and {above}")
