"""Discard output to a terminal that was closed, instead of failing with an I/O error.

leave_lost_terminal()       # after a signal; does nothing if the terminal still exists
"""

from __future__ import annotations

import contextlib
import errno
import os
import termios

__all__ = ["leave_lost_terminal"]


def leave_lost_terminal() -> None:
    """Redirect standard output and standard error to /dev/null if they belong to a terminal that was closed."""
    for fd in (1, 2):
        try:
            termios.tcgetattr(fd)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # a file or a pipe gives ENOTTY
                with contextlib.suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, fd)
                    os.close(nowhere)
