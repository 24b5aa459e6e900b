"""Name the resource that this machine lacks if a process, thread or file cannot be created, and the limits on it.

shortage(error)     # "no process or thread can be created. Limits: 64 in its cgroup (pids.max), ...", or ""
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

__all__ = ["shortage"]

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Values from here on mean no limit: cgroup v1 has no word for it."""
_NO_THREAD = "can't start new thread"
"""Message of the RuntimeError that Python raises instead of EAGAIN."""
_MIB = 1 << 20


def shortage(error: BaseException, root: Path = Path("/")) -> str:
    """Return what is missing, its limits and what to do, without the last full stop; empty for any other error."""
    number = errno.EAGAIN if str(error) == _NO_THREAD else error.errno if isinstance(error, OSError) else None
    if number not in _SHORTAGES:
        return ""
    what, limits, remedy = _SHORTAGES[number]
    found = ", ".join(limits(root))
    return f"{what}.{f' Limits: {found}.' if found else ''} {remedy}"


def _processes(root: Path) -> list[str]:
    user = 0 if os.geteuid() == 0 else _own(resource.RLIMIT_NPROC)  # the kernel exempts root
    return _named(
        (_group(root, "pids", "pids.max"), "in its cgroup (pids.max)"),
        (user, "per user (`ulimit -u`)"),
        (_number(root / "proc/sys/kernel/pid_max"), "on this machine (kernel.pid_max)"),
    )


def _memory(root: Path) -> list[str]:
    group = _group(root, "memory", "memory.max") or _group(root, "memory", "memory.limit_in_bytes")
    own = _own(resource.RLIMIT_AS)
    return _named((group // _MIB, "MiB in its cgroup (memory.max)"), (own // _MIB, "MiB per process (`ulimit -v`)"))


def _files(root: Path) -> list[str]:
    return _named((_own(resource.RLIMIT_NOFILE), "per process (`ulimit -n`)"))


def _files_of_all(root: Path) -> list[str]:
    return _named((_number(root / "proc/sys/fs/file-max"), "on this machine (fs.file-max)"))


_SHORTAGES: dict[int | None, tuple[str, Callable[[Path], list[str]], str]] = {
    errno.EAGAIN: (
        "no process or thread can be created", _processes, "Raise the one that is reached, or end other processes",
    ),
    errno.ENOMEM: ("no memory is left", _memory, "Free memory, or raise the limit that is reached"),
    errno.EMFILE: ("no file can be opened", _files, "Raise it"),
    errno.ENFILE: ("no file can be opened", _files_of_all, "Raise it, or end other processes"),
}  # fmt: skip


def _named(*limits: tuple[int, str]) -> list[str]:
    return [f"{limit} {name}" for limit, name in limits if 0 < limit < _UNLIMITED]


def _own(kind: int) -> int:
    return max(0, resource.getrlimit(kind)[0])  # RLIM_INFINITY is negative


def _group(root: Path, controller: str, name: str) -> int:
    """The lowest such limit of this process's control group and those above it; 0 if none is set."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0
    groups = {kind: path for _, kind, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    top = root / _CGROUPS.relative_to("/")
    if controller in groups:
        top, group = top / controller, groups[controller]
    else:
        group = groups.get("", "/")
    folder = top / group.lstrip("/")
    limits = [_number(above / name) for above in (folder, *folder.parents) if above.is_relative_to(top)]
    return min((limit for limit in limits if limit), default=0)


def _number(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
