"""Exit codes of a rank, and so of `rankscope train`, beside 0 (finished) and 130 (SIGINT)."""

from __future__ import annotations

__all__ = [
    "EXIT_EXCLUDED",
    "EXIT_FAILED",
    "EXIT_FENCED",
    "EXIT_GIVEN_UP",
    "EXIT_MISTAKE",
    "EXIT_PREEMPTED",
    "NOT_RESTARTED",
]

EXIT_FAILED = 1
"""A rank raised or was killed, and no restart is left."""
EXIT_MISTAKE = 2
"""What was asked for cannot be done: configuration, fault, run folder, checkpoint."""
EXIT_GIVEN_UP = 3
"""The guard stopped the run: what fails would fail again."""
EXIT_FENCED = 4
"""A later attempt has taken the run: this process came too late."""
EXIT_EXCLUDED = 5
"""This node failed too often and leaves; the others go on without it."""
EXIT_PREEMPTED = 143
"""SIGTERM: 128 + 15, as if it had not been handled. What was trained is saved; `--resume` goes on."""
NOT_RESTARTED = (EXIT_MISTAKE, EXIT_GIVEN_UP, EXIT_FENCED, EXIT_PREEMPTED)
"""Codes that a restart would only repeat."""
