"""Detect that a run's folder was moved or deleted and replaced by another one.

    held = HeldFolder(run.path)
    held.problem()          # "" or "the run's folder was replaced while it ran: it is /runs/old now, ..."

Processes with open files would continue to write into the old folder, while newly opened paths go into the new one.
Inode numbers alone do not prove a replacement: some network file systems assign new ones.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["HeldFolder"]


class HeldFolder:
    """A folder, held open by a descriptor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # writers into the folder report the error
            self._fd = -1
        self._place = self._now()

    def problem(self) -> str:
        """The problem in one line without a full stop; empty if the folder is still at its path, or if nothing is
        there."""
        now = self._now()
        if now == self._place or not now:
            return ""
        try:
            is_same = os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return ""
        if is_same:
            return ""
        where = "was deleted" if now.endswith(" (deleted)") else f"is {now} now"
        return f"the run's folder was replaced while it ran: it {where}, and another one is at {self.path}"

    @property
    def fd(self) -> int:
        """The folder's descriptor; -1 if it could not be opened."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _now(self) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{self._fd}")
        except OSError:
            return ""
