"""Find the address by which other nodes reach this one: its host name may resolve to 127.0.1.1 (Debian's default).

    is_own("10.0.0.1")                   # True on the machine that has this address, whatever its name resolves to
    own_address("10.0.0.1", 29500)       # "10.0.0.7": the address from which that endpoint is reached
    gloo_interface("10.0.0.7")           # "eth1" if gloo, which resolves the name, would take the loopback; else None

torch compares the endpoint with the addresses to which the host name resolves. If these are loopback addresses, the
endpoint's node does not recognise itself, no node hosts the store, and ranks of other nodes connect to themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

__all__ = ["gloo_interface", "is_own", "own_address"]

_SIOCGIFADDR = 0x8915


def is_own(host: str) -> bool:
    """Return True if a name or address is this machine's, so that a socket can listen there."""
    for family, kind, protocol, _, where in _addresses(host):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((where[0], 0, *where[2:]))
            return True
    return False


def own_address(host: str, port: int) -> str | None:
    """Return the source address of packets to `host`; None if there is no route. Nothing is sent."""
    for family, _, _, _, where in _addresses(host):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((where[0], port, *where[2:]))
            return str(probe.getsockname()[0])
    return None


def gloo_interface(address: str | None) -> str | None:
    """Return the network interface to set for gloo; None if the host name resolves to an address that other nodes can
    reach."""
    if address is None or _is_loopback(address):
        return None
    known = [str(where[0]) for _, _, _, _, where in _addresses(socket.gethostname())]
    if any(not _is_loopback(found) for found in known):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def _addresses(host: str) -> list[tuple[int, int, int, str, tuple[str, ...]]]:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except (OSError, UnicodeError):
        return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
