"""CUDA events on the compute stream of a played device, for the probe that stamps steps.

recorder.stamps._new_event = lambda: PlayedEvent(rank)
"""

from __future__ import annotations

from typing import Protocol

from tests.support.played.host_time import PlayedClock

__all__ = ["PlayedEvent"]


class StampedRank(Protocol):
    """The attributes of a rank that an event reads."""

    clock: PlayedClock
    reached_ns: int | None
    """Time since the run's start at which the compute stream reaches the host's current operation; None: never."""


class PlayedEvent:
    """A CUDA event on the compute stream of a played device."""

    def __init__(self, rank: StampedRank) -> None:
        self._rank = rank
        self._at_ns: int | None = None

    def record(self) -> None:
        self._at_ns = self._rank.reached_ns

    def query(self) -> bool:
        now_ns = self._rank.clock.mono_ns() - self._rank.clock.begin_ns
        return self._at_ns is not None and self._at_ns <= now_ns

    def synchronize(self) -> None:
        if self._at_ns is not None:
            self._rank.clock.set(self._at_ns)

    def elapsed_time(self, other: PlayedEvent) -> float:
        assert self._at_ns is not None
        assert other._at_ns is not None
        return (other._at_ns - self._at_ns) / 1e6
