"""Nodes as network namespaces: machines with a network stack, an address and a cable of their own, on one machine.

    with Network(2) as network:
        Popen([*network.on(1), "rankscope", "train", ..., "--rdzv-endpoint", f"{network.address(0)}:29500"])
        network.cut(1)      # the cable of node 1 is pulled: nothing arrives and nobody is told
        network.restore(1)
        network.kill(1)     # every process of the node, as when its power fails

Disks, clocks and process numbers are shared, as they are between machines with a network disk. Needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
from types import TracebackType

INTERFACE = "eth0"


@functools.cache
def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "no `ip` (iproute2)"
    done = subprocess.run(["ip", "netns", "add", _PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"network namespaces cannot be made here: {done.stderr.strip()}"
    try:
        cable = ("-n", _PROBE, "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        return subprocess.run(["ip", *cable], capture_output=True, text=True, check=False).stderr.strip()
    finally:
        _ip("netns", "delete", _PROBE)


_PROBE = f"rankscope-{os.getpid()}"


class Network:
    """A switch and so many nodes, each with one cable to it."""

    def __init__(self, num_nodes: int) -> None:
        self.nodes = range(num_nodes)

    def name(self, node: int) -> str:
        """Name of its namespace."""
        return f"{_PROBE}-{node}"

    def address(self, node: int) -> str:
        return f"10.213.7.{node + 1}"

    def on(self, node: int) -> list[str]:
        """Prefix of a command that runs on this node; the process keeps its number."""
        return ["ip", "netns", "exec", self.name(node)]

    def cut(self, node: int) -> None:
        _ip("-n", self._switch, "link", "set", f"port{node}", "down")

    def restore(self, node: int) -> None:
        _ip("-n", self._switch, "link", "set", f"port{node}", "up")

    def kill(self, node: int) -> None:
        """SIGKILL to every process of a node."""
        listed = subprocess.run(["ip", "netns", "pids", self.name(node)], capture_output=True, text=True, check=True)
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def _switch(self) -> str:
        return f"{_PROBE}-switch"

    def __enter__(self) -> Network:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for node in self.nodes:
            name, port = self.name(node), f"port{node}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", self._switch, "link", "set", port, "master", "bridge")
            _ip("-n", self._switch, "link", "set", port, "up")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in (*map(self.name, self.nodes), self._switch):
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
