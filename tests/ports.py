"""Ports for servers that tests start.

port = free_port()
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_port"]

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_CHOICE = random.SystemRandom()  # parallel tests must not draw the same ports


def free_port() -> int:
    """A TCP port at which nobody listened a moment ago.

    It is below the kernel's ephemeral ports: gloo takes dozens of those a second, and could take this one before the
    server has started.
    """
    above = int(_EPHEMERAL.read_text().split()[0])
    for _ in range(100):
        port = _CHOICE.randrange(_LOWEST, above)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port between {_LOWEST} and {above}")
