"""Report a failing standard output (a full disk, `/dev/full`) in one line instead of a traceback.

reopen_closed_streams()                 # first: a shell may have closed some (`<&-`)
if problem := lost_output(error):       # "No space left on device", where it is standard output's error
    ...
"""

from __future__ import annotations

import errno
import os
import sys

__all__ = ["EXIT_LOST_OUTPUT", "lost_output", "reopen_closed_streams"]

EXIT_LOST_OUTPUT = 74
"""EX_IOERR of sysexits.h."""
_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def reopen_closed_streams() -> None:
    """Open closed standard streams to nowhere: Python's are None, and the next file would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
        setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 - to the end of the process


def lost_output(error: OSError | None = None) -> str:
    """Return why standard output cannot be written; "" if it can, or if `error` concerns another file.

    Afterwards nothing is left in it that would fail at the exit.
    """
    if error is not None and (error.errno not in _ERRNOS or error.filename is not None):
        return ""
    try:
        sys.stdout.flush()
        if error is not None:  # what was not buffered is lost: only another write shows whose error it was
            os.write(1, b"\n")
    except OSError as found:
        if found.errno not in _ERRNOS:  # such as a reader that has enough
            return ""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        return found.strerror or type(found).__name__
    return ""
