"""Actions on a stop signal that do nothing, and such that note what was asked of them."""

from __future__ import annotations

import os


class NoActions:
    """For a launcher that gets no signal."""

    def announce(self, number: int) -> None:
        raise AssertionError(f"signal {number}")

    report = announce

    def end_at_once(self, number: int, reason: str) -> None:
        raise AssertionError(reason)


class NotedActions:
    """Each call as a line in a pipe, which outlives the process that ends at once."""

    def __init__(self, writer: int) -> None:
        self._writer = writer

    def announce(self, number: int) -> None:
        os.write(self._writer, f"announce {number}\n".encode())

    def report(self, number: int) -> None:
        os.write(self._writer, f"report {number}\n".encode())

    def end_at_once(self, number: int, reason: str) -> None:
        os.write(self._writer, f"end {number}: {reason}\n".encode())
