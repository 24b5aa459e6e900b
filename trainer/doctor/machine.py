"""Checks of the machine: open files, shared memory, disk, clock, host name, ports, ptrace.

for check in machine_checks(Path("runs")): ...
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
from pathlib import Path

from trainer.doctor.check import Check

__all__ = ["disk_check", "machine_checks", "shared_memory_check"]

GIB = 1 << 30
LEAST_DISK_BYTES = 10 * GIB
"""Minimum free disk: a day of tapes of eight ranks, and a few checkpoints of a small model."""
LEAST_SHARED_BYTES = 1 * GIB
"""Minimum shared memory. Docker's default of 64 MiB is too small for data workers or copies of the state."""
LEAST_FILES = 4096
"""Minimum open files: each rank has sockets to its peers, tapes and pipes to workers."""
REMOTE = {"nfs", "nfs4", "lustre", "ceph", "fuse", "fuse.sshfs", "cifs", "smb3", "gpfs", "beegfs", "9p"}
_CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex
_CAP_SYS_PTRACE = 19


def machine_checks(runs: Path) -> list[Check]:
    """All checks; `runs` is the folder for runs."""
    return [
        disk_check(runs),
        shared_memory_check(Path("/dev/shm")),
        _open_files(),
        _clock(),
        _own_name(),
        _loopback(),
        _ptrace(),
    ]


def disk_check(runs: Path) -> Check:
    """Check that a run can be written, and the free space."""
    place = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        remedy = "choose another with --set run.dir=FOLDER"
        return Check(name="runs folder", status="failed", found=f"{place} cannot be written", remedy=remedy)
    free, kind = shutil.disk_usage(place).free, _file_system(place)
    found = f"{free / GIB:.1f} GiB free in {place} ({kind or 'unknown file system'})"
    if free < LEAST_DISK_BYTES:
        remedy = "free space on it, or choose another disk with --set run.dir=FOLDER"
        return Check(name="runs folder", status="warning", found=found, remedy=remedy)
    if kind in REMOTE:
        remedy = "tapes belong on a local disk; rankscope collect merges the nodes' folders afterwards"
        return Check(name="runs folder", status="warning", found=found, remedy=remedy)
    return Check(name="runs folder", status="ok", found=found)


def shared_memory_check(place: Path) -> Check:
    """Check /dev/shm, used by data workers and copies of the training state."""
    if not place.is_dir():
        remedy = "mount a tmpfs there; without it copies of the state stay in the processes"
        return Check(name="shared memory", status="warning", found=f"no {place}", remedy=remedy)
    usage = shutil.disk_usage(place)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {place}"
    if usage.free < LEAST_SHARED_BYTES:
        remedy = "docker run --shm-size=16g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"
        return Check(name="shared memory", status="warning", found=found, remedy=remedy)
    return Check(name="shared memory", status="ok", found=found)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft:,} a process (at most {hard:,})" if hard != resource.RLIM_INFINITY else f"{soft:,} a process"
    if 0 <= soft < LEAST_FILES:
        return Check(name="open files", status="warning", found=found, remedy=f"ulimit -n {LEAST_FILES * 16}")
    return Check(name="open files", status="ok", found=found)


def _clock() -> Check:
    """Ask the kernel whether the clock is synchronised. (Nodes with different clocks are still compared by
    durations.)
    """
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (AttributeError, OSError):
        state = -1
    if state == _CLOCK_UNSYNCHRONISED:
        remedy = "start chrony or systemd-timesyncd (offsets between nodes are measured and corrected in any case)"
        return Check(name="clock", status="note", found="not synchronised", remedy=remedy)
    return Check(name="clock", status="ok", found="synchronised" if state >= 0 else "not known whether synchronised")


def _own_name() -> Check:
    """Check the host name's address, which gloo and the rendezvous look up."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        remedy = f"add it to /etc/hosts, or name an interface: GLOO_SOCKET_IFNAME={_interface()}"
        found = f"{name} has no address: {error.strerror or error}"
        return Check(name="host name", status="warning", found=found, remedy=remedy)
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        remedy = f"with several nodes: GLOO_SOCKET_IFNAME={_interface()} (and NCCL_SOCKET_IFNAME)"
        found = f"{name} resolves to {', '.join(addresses)} only"
        return Check(name="host name", status="note", found=found, remedy=remedy)
    return Check(name="host name", status="ok", found=f"{name} resolves to {', '.join(addresses)}")


def _interface() -> str:
    names = sorted(name for _, name in socket.if_nameindex() if name != "lo")
    return names[0] if names else "eth0"


def _loopback() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2.0):
            pass
    except OSError as error:
        found = f"no connection to a local port on 127.0.0.1: {error.strerror or error}"
        return Check(name="ports", status="failed", found=found, remedy="ip link set lo up; check the firewall")
    return Check(name="ports", status="ok", found="can listen and connect on 127.0.0.1")


def _ptrace() -> Check:
    """Check that py-spy may read a process that it did not start."""
    if _has_capability(_CAP_SYS_PTRACE):
        return Check(name="ptrace", status="ok", found="allowed for all processes (CAP_SYS_PTRACE)")
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope == 0:
        return Check(name="ptrace", status="ok", found="allowed for processes of this user")
    remedy = "sudo rankscope stacks, or sysctl kernel.yama.ptrace_scope=0, or --cap-add SYS_PTRACE in a container"
    found = f"kernel.yama.ptrace_scope is {scope}: py-spy may not read running processes"
    return Check(name="ptrace", status="note", found=found, remedy=remedy)


def _has_capability(number: int) -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(effective >> number & 1)


def _file_system(place: Path) -> str:
    """File system type of a folder, from the longest mount point above it; empty if unknown."""
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, found, *_ = line.split()
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and place.resolve().is_relative_to(point):
            best, kind = point, found
    return kind
