"""Exit codes of a rank, and so of `rankscope train`, beside 0 (finished) and 128 + signal (interrupted)."""

from __future__ import annotations

__all__ = ["EXIT_FAILED", "EXIT_GIVEN_UP", "EXIT_MISTAKE", "NOT_RESTARTED"]

EXIT_FAILED = 1
"""A rank raised or was killed, and no restart is left."""
EXIT_MISTAKE = 2
"""What was asked for cannot be done: configuration, fault, run folder, checkpoint."""
EXIT_GIVEN_UP = 3
"""The guard stopped the run: what fails would fail again."""
NOT_RESTARTED = (EXIT_MISTAKE, EXIT_GIVEN_UP)
"""Codes that a restart would only repeat."""
