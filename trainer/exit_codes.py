"""Exit codes of a rank and of `rankscope train`, besides 0 (finished) and 130 (SIGINT)."""

from __future__ import annotations

import errno

__all__ = [
    "EXIT_EXCLUDED",
    "EXIT_FAILED",
    "EXIT_FENCED",
    "EXIT_FINISHED",
    "EXIT_GIVEN_UP",
    "EXIT_MISTAKE",
    "EXIT_PREEMPTED",
    "EXIT_STORAGE",
    "NOT_RESTARTED",
    "STORAGE_ERRNOS",
]

EXIT_FAILED = 1
"""A rank raised or was killed, and no restart is left."""
EXIT_MISTAKE = 2
"""The request cannot be carried out: configuration, fault, run folder, checkpoint."""
EXIT_GIVEN_UP = 3
"""The guard stopped the run, because a retry would fail again."""
EXIT_FENCED = 4
"""A later attempt has taken over the run."""
EXIT_EXCLUDED = 5
"""This node failed too often and leaves; the other nodes continue without it."""
EXIT_FINISHED = 6
"""`--resume` of a run that has finished: nothing was started."""
EXIT_STORAGE = 75
"""The disk is full or does not answer (EX_TEMPFAIL): nothing was renamed or removed, and `--resume` may be retried."""
EXIT_PREEMPTED = 143
"""Ended by SIGTERM: 128 + 15, as if the signal had not been handled. The state is saved, and `--resume` continues."""
STORAGE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})
"""System errors that lead to EXIT_STORAGE."""
NOT_RESTARTED = (EXIT_MISTAKE, EXIT_GIVEN_UP, EXIT_FENCED, EXIT_PREEMPTED)
"""Exit codes that a restart would only repeat."""
