"""Events that could not be written to their file. They are kept in the user's temporary folder until the file can be
written.

    path = save_unwritten(events_path, lines)     # by a process at its end
    restore_unwritten([events_path, ...])         # by the next launch and by readers

A read-only or full disk cannot store the record of the failure that it caused. A saved file is named by a digest of the
events' path, so it is restored only by processes on the same machine that know this path.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .files.safe_open import open_plain

__all__ = ["MAX_UNWRITTEN_BYTES", "missing_newline", "restore_unwritten", "save_unwritten"]

MAX_UNWRITTEN_BYTES = 4 << 20
"""Maximum size of one saved file; thousands of events."""


def missing_newline(fd: int) -> bytes:
    """Return the bytes to write before an appended line. If the file's last line is torn (by a full disk, a kill or a
    power cut), this is a newline, because the new line would otherwise become part of the torn one. In all other cases
    it is nothing.
    """
    size = os.fstat(fd).st_size
    return b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""


def save_unwritten(events: Path, lines: Iterable[bytes]) -> Path | None:
    """Append lines for an `events.jsonl` to its file in the temporary folder; None if that fails too."""
    with contextlib.suppress(OSError):
        folder = _folder()
        folder.mkdir(mode=0o700, exist_ok=True)
        if _is_own(folder):
            path = _place(events)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                data = missing_newline(fd) + b"".join(lines)
                if os.fstat(fd).st_size + len(data) <= MAX_UNWRITTEN_BYTES:
                    os.write(fd, data)
                    return path
            finally:
                os.close(fd)
    return None


def restore_unwritten(events: Iterable[Path]) -> int:
    """Append saved lines to these files, where possible; returns the number of files restored."""
    if not _is_own(_folder()):
        return 0
    num_files = 0
    for path in events:
        with contextlib.suppress(OSError):
            num_files += _restore(path)
    return num_files


def _restore(events: Path) -> bool:
    place = _place(events)
    if not place.exists():
        return False
    target = os.open(events, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        taken = place.with_name(f"{place.name}.{os.getpid()}")
        place.rename(taken)  # if two readers try, only one can rename and restores it
        with open(open_plain(taken), "rb") as file:
            data = missing_newline(target) + file.read(MAX_UNWRITTEN_BYTES)
        try:
            num_written = os.write(target, data)
        except OSError:
            num_written = 0
        if num_written == len(data):
            taken.unlink()
            return True
        if num_written:
            os.ftruncate(target, os.fstat(target).st_size - num_written)
        taken.rename(place)
        return False
    finally:
        os.close(target)


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"rankscope-unwritten-{os.getuid()}"


def _place(events: Path) -> Path:
    return _folder() / f"{hashlib.sha256(os.fsencode(os.path.realpath(events))).hexdigest()[:32]}.jsonl"


def _is_own(folder: Path) -> bool:
    """Return True if only this user can access the folder. This is checked because any user can create folders in the
    temporary folder."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
