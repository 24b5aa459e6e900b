"""A small disk whose power can be cut: an ext4 file system in a file, mounted through a loop device.

    with LoopDisk(folder, size_bytes=400 << 20) as disk:
        ...                      # write to disk.path
        disk.cut_power()         # data not written back is lost; every later access fails
        kill(...)                # processes that still have its files open
        disk.power_on()          # mounts it again: the journal is replayed

`cut_power` uses the kernel's `EXT4_IOC_SHUTDOWN` without flushing the log, as file system tests do: from then on no
byte reaches the image, and dirty pages and the journal's open transaction are dropped. Data already sent to the device
are kept, as on a device without a volatile cache. Needs root and loop devices.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import struct
import subprocess
import time
from pathlib import Path

__all__ = ["LoopDisk", "has_loop_disks", "own_mounts"]

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2
UNMOUNT_S = 20.0
CLONE_NEWNS = 0x00020000


class LoopDisk:
    """A mounted image. Raises OSError or CalledProcessError if it cannot be created."""

    def __init__(self, folder: Path, *, size_bytes: int = 400 << 20) -> None:
        own_mounts()
        self.path = folder.resolve() / "disk"
        self._image = self.path.with_suffix(".img")
        self.path.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(size_bytes)
        _run("mkfs.ext4", "-q", "-F", self._image)
        self.power_on()

    def cut_power(self) -> None:
        """Stop all writes to the image."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("=I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def power_on(self) -> None:
        """Mount the image again; unmount it first if it is still mounted."""
        self._unmount()
        _run("mount", "-o", "loop", self._image, self.path)

    def __enter__(self) -> LoopDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self._unmount()
        self._image.unlink()

    def _unmount(self) -> None:
        """Unmount it, once no process has its files open any more."""
        deadline = time.monotonic() + UNMOUNT_S
        while self._is_mounted():
            done = subprocess.run(["umount", self.path], capture_output=True, text=True, check=False)
            if done.returncode and time.monotonic() > deadline:
                raise OSError(done.stderr.strip())
            time.sleep(0.05 if done.returncode else 0.0)

    def _is_mounted(self) -> bool:
        """Read the kernel's list of mounts, since a file system without power cannot be queried."""
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return str(self.path) in (line.split()[1] for line in mounts)


@functools.cache
def own_mounts() -> None:
    """Enter a private mount namespace: a copy of a mount in another namespace would keep the dead file system in use
    after its unmount. Only processes started later see the disk. Raises OSError.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespace")
    _run("mount", "--make-rprivate", "/")


def has_loop_disks(folder: Path) -> bool:
    """Return True if this user may mount images here."""
    try:
        with LoopDisk(folder, size_bytes=8 << 20):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
