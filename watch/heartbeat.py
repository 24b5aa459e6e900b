"""The sign of life of `watch` to the launcher: one byte a second through a pipe, which no disk can delay.

Heartbeat(fd).beat()          # of the pipe end from the launcher; -1: no listener
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["Heartbeat"]


class Heartbeat:
    """The writing end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        if fd >= 0:
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)  # not for the trackers and commands that watch starts

    def beat(self) -> None:
        """Write a byte; a full pipe or a launcher that is gone is none of our business."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, b".")
