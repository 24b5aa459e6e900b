"""Report a failing standard output (a full disk, `/dev/full`) in one line instead of a traceback.

reopen_closed_streams()                 # first, since a shell may have closed some (`<&-`)
if problem := lost_output(error):       # "No space left on device", if it is an error of standard output
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
    """Open closed standard streams to /dev/null: in Python they are None, and the next file would get their
    descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(number, True)
        setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 - to the end of the process


def lost_output(error: OSError | None = None) -> str:
    """Return why standard output cannot be written; "" if it can, or if `error` concerns another file.

    Afterwards its buffer is empty, so that the exit cannot fail.
    """
    if error is not None and (error.errno not in _ERRNOS or error.filename is not None):
        return ""
    try:
        sys.stdout.flush()
        # If standard output is unbuffered, a failed write leaves nothing to flush, so `flush` succeeds. Only another
        # write shows whether the error came from standard output.
        if error is not None:
            os.write(1, b"\n")
    except OSError as found:
        if found.errno not in _ERRNOS:  # for example EPIPE, because the reader has closed the pipe
            return ""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        return found.strerror or type(found).__name__
    return ""
