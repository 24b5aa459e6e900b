"""Spans of one profiler trace, and the windows of its steps."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from store.arrays import Floats, Ints
from store.readers.traces.intervals import Spans, union

__all__ = ["CollectedSpans", "step_windows"]

SHORT_MARK = 0.1
"""A step mark shorter than this share of the distance to the next mark is only a point in time (ROCm: 16 us)."""


@dataclass(slots=True)
class CollectedSpans:
    """Start and end times of the relevant events, in microseconds of the trace's clock."""

    launches: tuple[array[int], array[float]] = field(default_factory=lambda: (array("q"), array("d")))
    """Correlation ID and time of host calls that launch device work."""
    device_work: tuple[array[int], array[float], array[float]] = field(
        default_factory=lambda: (array("q"), array("d"), array("d"))
    )
    """Correlation ID, start and end of device work."""
    unknown: dict[str, int] = field(default_factory=dict)
    """{unknown category: number of spans}."""
    categories: set[str] = field(default_factory=set)
    """Categories of device work and of the calls that launch it."""
    processes: dict[Any, str] = field(default_factory=dict)
    """Names of processes by pid."""
    by_kind: dict[str, tuple[array[float], array[float]]] = field(default_factory=dict)
    """Starts and ends of spans by kind: kernel, nccl_kernel, copy, operator, backend, data, ?<category>."""
    num_events: int = 0
    damaged: int = 0
    host_steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    device_steps: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(self, kind: str, begin: float, end: float) -> None:
        """Add a span of a kind."""
        begins, ends = self.by_kind.setdefault(kind, (array("d"), array("d")))
        begins.append(begin)
        ends.append(end)

    def is_of_profiler(self) -> bool:
        """Return False if all categories are unknown, as in a browser's or a compiler's trace."""
        known = any(not kind.startswith("?") for kind in self.by_kind)
        return not self.unknown or known or bool(self.host_steps or self.device_steps or self.launches[0])

    def spans(self, *kinds: str) -> Spans:
        """Union of the spans of these kinds."""
        found = [self.by_kind[kind] for kind in kinds if kind in self.by_kind]
        begins = [np.frombuffer(begin) for begin, _ in found] or [np.zeros(0)]
        ends = [np.frombuffer(end) for _, end in found] or [np.zeros(0)]
        return union(np.concatenate(begins), np.concatenate(ends))


def step_windows(collected: CollectedSpans, on_device: bool) -> tuple[Ints, Floats, Floats]:
    """Number, start and end of each step. They come from the first of these that exists: the device's step marks, the
    kernels that the host launched in each step, the host's marks. Without any marks the whole trace is one step.
    """
    device = _marks(collected.device_steps)
    host = _marks(collected.host_steps)
    if on_device and device is not None:
        steps, begin, end = device
        # kernels of consecutive steps may leave a gap or overlap: make the windows contiguous
        end[:-1] = np.maximum(begin[1:], begin[:-1])
        return steps, begin, end
    if host is None:
        kinds = ("kernel", "copy", "nccl_kernel") if on_device else ("operator", "backend")
        begin, end = collected.spans(*kinds)
        return np.zeros(min(len(begin), 1), dtype=np.int64), begin[:1], end[-1:]
    return (_by_correlation(collected, host) if on_device else None) or host


def _marks(steps: Mapping[int, tuple[float, float]]) -> tuple[Ints, Floats, Floats] | None:
    """Windows from step marks. If the marks are points in time, each window lasts until the next mark, and the last
    mark is left out.
    """
    if not steps:
        return None
    numbers = np.array(sorted(steps), dtype=np.int64)
    begin = np.array([steps[int(n)][0] for n in numbers])
    end = np.array([steps[int(n)][1] for n in numbers])
    if len(numbers) > 1:
        apart = float(np.median(np.diff(begin)))
        if apart > 0 and float(np.median(end - begin)) < SHORT_MARK * apart:
            return numbers[:-1], begin[:-1], begin[1:].copy()
    return numbers, begin, end


def _by_correlation(collected: CollectedSpans, host: tuple[Ints, Floats, Floats]) -> tuple[Ints, Floats, Floats] | None:
    """Device windows: from the first kernel that the host launched in a step to the first kernel of the next step.

    None if the trace does not tell which call launched which kernel.
    """
    steps, begin, _ = host
    calls, called = np.frombuffer(collected.launches[0], dtype=np.int64), np.frombuffer(collected.launches[1])
    kernels = np.frombuffer(collected.device_work[0], dtype=np.int64)
    starts, ends = np.frombuffer(collected.device_work[1]), np.frombuffer(collected.device_work[2])
    if not len(calls) or not len(kernels):
        return None
    order = np.argsort(calls, kind="stable")
    at = np.minimum(np.searchsorted(calls[order], kernels), len(calls) - 1)
    known = calls[order][at] == kernels
    step_of = np.searchsorted(begin, called[order][at], side="right") - 1
    inside = known & (step_of >= 0)
    first = np.full(len(steps), np.inf)
    np.minimum.at(first, step_of[inside], starts[inside])
    last = np.full(len(steps), -np.inf)
    np.maximum.at(last, step_of[inside], ends[inside])
    kept = np.isfinite(first)
    if kept.sum() < 1:
        return None
    first, last = first[kept], last[kept]
    last[:-1] = np.maximum(first[1:], first[:-1])
    return steps[kept], first, last
