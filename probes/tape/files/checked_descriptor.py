"""Descriptors that stay usable in a training process, although its script may close any descriptor.

    descriptor = CheckedDescriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor.number(), line)          # opened again if the script has closed it
    descriptor.close()

A script that closes all descriptors (`os.closerange`, a daemon's start) also closes ours. The next files that the
script opens may get the same numbers, and our records would then be written into them. So our descriptors have high
numbers, which the kernel reuses last, and each is checked before use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

__all__ = ["CheckedDescriptor", "moved_up"]

LOWEST = 512
"""Half of the usual limit of 1,024 descriptors per process."""


def moved_up(fd: int) -> int:
    """Replace `fd` by a high descriptor of the same file; returns `fd` itself if the process may have no such
    descriptor."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    except OSError:  # the process's limit is below `LOWEST`
        return fd
    os.close(fd)
    return high


class CheckedDescriptor:
    """A file that stays open. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path, flags: int, mode: int = 0o644) -> None:
        self._path, self._flags, self._mode = path, flags | os.O_CLOEXEC, mode
        self.is_open = True
        self._open()

    def number(self) -> int:
        """The descriptor, for one use. Raises OSError."""
        if not self.is_open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if not self._is_own():
            self._open()
        return self._fd

    def close(self) -> None:
        """Close the file. If another file has its number by now, that file stays open."""
        if self.is_open and self._is_own():
            os.close(self._fd)
        self.is_open = False

    def _open(self) -> None:
        self._fd = moved_up(os.open(self._path, self._flags, self._mode))
        found = os.fstat(self._fd)
        self._identity = (found.st_dev, found.st_ino)

    def _is_own(self) -> bool:
        with contextlib.suppress(OSError):
            found = os.fstat(self._fd)
            return (found.st_dev, found.st_ino) == self._identity
        return False
