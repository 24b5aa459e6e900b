"""Open untrusted run files: regular files only, no symlinks, never blocks on a FIFO.

    with open(open_plain(path), "rb") as file: ...
    blob = read_plain(path, limit_bytes=1 << 20)
    folder_problem(path)          # "is a link: not followed", or "" for a folder

A link could lead to any file that the reader may open, a FIFO without a writer would block, and a device never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "LINK", "NOT_PLAIN", "NO_FOLDER", "file_problem", "folder_problem", "open_plain", "read_plain", "sync_file",
    "sync_folder", "write_private",
]  # fmt: skip

LINK = "is a link: not followed"
NOT_PLAIN = "is not a regular file: not opened"
NO_FOLDER = "is not a folder"


def open_plain(path: Path) -> int:
    """Open a plain file for reading and return its descriptor. Raises OSError, whose `strerror` describes what the path
    is."""
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer. On a plain file the flag changes nothing.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, LINK, str(path)) from None
        if error.errno == errno.ENXIO:  # a socket
            raise OSError(errno.EINVAL, NOT_PLAIN, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, NOT_PLAIN, str(path))
    return fd


def read_plain(path: Path, limit_bytes: int, start_byte: int = 0) -> bytes:
    """At most `limit_bytes` of a plain file. Raises OSError as `open_plain` does."""
    with open(open_plain(path), "rb") as file:
        file.seek(start_byte)
        return file.read(limit_bytes)


def sync_file(path: Path) -> None:
    """Sync a plain file, including what other processes have written to it. Raises OSError."""
    fd = open_plain(path)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, readable only by its owner: a power cut leaves the old or the new content.

    Raises OSError.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_problem(path: Path) -> str:
    """Why a path cannot be opened as a plain file; "" if it can, or if nothing is there."""
    return _problem(path, stat.S_ISREG, NOT_PLAIN)


def folder_problem(path: Path) -> str:
    """The reason why a path is not a folder that may be read; "" if it is such a folder, or if nothing is there."""
    return _problem(path, stat.S_ISDIR, NO_FOLDER)


def _problem(path: Path, is_right: Callable[[int], bool], otherwise: str) -> str:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return ""
    if stat.S_ISLNK(mode):
        return LINK
    return "" if is_right(mode) else otherwise
