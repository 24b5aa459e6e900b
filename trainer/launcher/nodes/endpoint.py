"""Check the address of a rendezvous before torch connects: torch prints C++ stacks for a minute, then a traceback.

    host, port = host_and_port("gpu-01:29500")     # NodeRendezvousError if it cannot be an address
    await_endpoint("gpu-01:29500")                 # returns once a process listens there

Nodes start at different times, and the name of a container may resolve only once it runs: a refused connection and an
unknown name are retried for as long as torch retries them.
"""

from __future__ import annotations

import contextlib
import socket
import time

from trainer.launcher.node import NodeRendezvousError
from trainer.launcher.nodes.host_address import is_own

__all__ = ["REACH_S", "await_endpoint", "await_torchrun", "host_and_port"]

REACH_S = 60.0
"""Seconds to wait for a listener, as torch does by default (`read_timeout`)."""
TRY_S = 5.0
RETRY_S = 0.5


def host_and_port(endpoint: str, *, default_port: int = 0) -> tuple[str, int]:
    """Split HOST:PORT, also [IPv6]:PORT. `default_port`: used if the port is missing."""
    host, colon, digits = endpoint.strip().rpartition(":")
    if default_port and (not colon or digits.endswith("]")):
        host, digits = endpoint.strip(), str(default_port)
    port = int(digits) if digits.isdecimal() else 0
    if not host or not 0 < port < 2**16:
        given = endpoint or "(missing)"
        raise NodeRendezvousError(f"--rdzv-endpoint {given}: several nodes need HOST:PORT, the same on all of them.")
    return host.strip("[]"), port


def await_endpoint(endpoint: str, *, within_s: float | None = None, default_port: int = 0) -> None:
    """Wait until a process listens at HOST:PORT. Raises NodeRendezvousError, with the last reason, after `within_s`
    (default: `REACH_S`).
    """
    host, port = host_and_port(endpoint, default_port=default_port)
    within_s = REACH_S if within_s is None else within_s
    deadline_s = time.monotonic() + within_s
    while problem := _unreachable(host, port):
        if time.monotonic() > deadline_s:
            raise NodeRendezvousError(f"--rdzv-endpoint {endpoint}: {problem}, tried for {within_s:.0f} s.")
        time.sleep(RETRY_S)


def await_torchrun(endpoint: str, conf: str) -> None:
    """Wait until the node that hosts torchrun's c10d rendezvous can be reached. Returns at once if torch hosts it on
    this node or in a file. `conf`: KEY=VALUE,... as in --rdzv-conf. Raises NodeRendezvousError.
    """
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from trainer.torch_compat import is_rendezvous_host

    settings = {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in conf.split(","))}
    if "is_host" in settings or settings.get("store_type", "tcp") != "tcp":
        return
    try:
        host, _ = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    except ValueError as error:
        raise NodeRendezvousError(f"--rdzv-endpoint {endpoint}: {error}") from None
    with contextlib.suppress(OSError):  # if this machine's name does not resolve, torch reports it
        if is_own(host) or is_rendezvous_host(host):
            return
    timeout = settings.get("read_timeout", "")
    await_endpoint(endpoint, within_s=float(timeout) if timeout.isdecimal() else None, default_port=DEFAULT_PORT)


def _unreachable(host: str, port: int) -> str:
    """Reason why no connection can be opened; empty if one can."""
    try:
        with socket.create_connection((host, port), timeout=TRY_S):
            return ""
    except socket.gaierror as error:
        return f"the name {host} cannot be resolved ({error.strerror})"
    except UnicodeError:
        return f"{host} is no host name"
    except OSError as error:
        return f"no launcher listens there ({error.strerror or 'no answer'}); start that node, or correct the port"
