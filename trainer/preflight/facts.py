"""Versions and hardware of a rank, which should be the same on all ranks. Its settings are in `probes.tape.run_facts`.

    facts(torch.device("cpu"))["torch"]     # "2.13.0+cpu"

A fact that cannot be read is left out, so a node that lacks it differs from a node that has it.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from probes.tape.run_facts import versions

__all__ = ["boot_id", "device_model", "facts", "node_key"]

_INFINIBAND = Path("/sys/class/infiniband")


def facts(device: torch.device) -> dict[str, str]:
    """Versions and hardware of this rank's node."""
    found = {**versions(), "kernel": platform.release(), "cores": str(len(os.sched_getaffinity(0)))}
    found["device model"] = device_model(device)
    found["devices"] = str(torch.cuda.device_count()) if torch.cuda.is_available() else "no GPU"
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if hip := getattr(torch.version, "hip", None):
        found["hip"] = str(hip)
    with contextlib.suppress(Exception):  # builds without NCCL raise different errors
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    with contextlib.suppress(OSError):
        found["efa driver"] = Path("/sys/module/efa/version").read_text().strip()
    if ports := list(_ports()):
        found["network ports"] = ", ".join(ports)
    if mtu := _mtu():
        found["mtu"] = mtu
    return found


def device_model(device: torch.device) -> str:
    """Name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, "") or "cpu"  # on ARM, the file has no such line
    return "cpu"


def node_key() -> str:
    """Identity of this node: host name, kernel and network. Two containers on one machine count as two nodes."""
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{platform.node()} {boot_id()} {network}"


def boot_id() -> str:
    """Identity of the running kernel. Ranks with the same identity share processor cores."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def _ports() -> Iterator[str]:
    """`mlx5_0/1 ACTIVE 400 Gb/sec (4X NDR)` of each InfiniBand, RoCE or EFA port."""
    for port in sorted(_INFINIBAND.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            state = (port / "state").read_text().strip().partition(":")[2].strip()
            rate = (port / "rate").read_text().strip()
            yield f"{port.parts[-3]}/{port.name} {state} {rate}"


def _mtu() -> str:
    """MTU of each network interface that is up, without the loopback and interfaces of containers."""
    found = []
    for folder in sorted(Path("/sys/class/net").glob("*")):
        with contextlib.suppress(OSError):
            is_real = not folder.name.startswith(("lo", "veth", "docker", "br-", "virbr", "cali", "flannel"))
            if is_real and (folder / "operstate").read_text().strip() == "up":
                found.append((folder / "mtu").read_text().strip())
    return ", ".join(sorted(set(found)))
