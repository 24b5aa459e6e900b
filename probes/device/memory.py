"""Memory of a rank, and allocation retries: when memory is short, torch's caching allocator frees its cache and tries
again.

    read = memory_reader("cuda:0")      # bytes allocated on it; memory_reader("cpu"): resident bytes of the process
    allocator = AllocatorRetries("cuda:0")
    allocator.report(recorder.event)      # event `allocation_retries` if there are new ones; takes 0.1 ms

A retry waits for the device and costs a good part of a step. It means that memory in use plus a fragmented cache did
not fit. A nearly full device does not mean this, because the cache keeps all memory it has obtained.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from typing import Any

from ..fail_open import failing_open
from ..tape import event_kinds
from ..tape.format.schema import UNSET

__all__ = ["AllocatorRetries", "memory_reader"]

PEAK_GROWTH = 1.01
"""Minimum relative growth of the peak for another event, so that a slowly growing peak writes few events."""
_PAGE_BYTES = resource.getpagesize()


def memory_reader(device: str) -> Callable[[], int]:
    """Return the function that reads `steps.memory_bytes` (bytes); UNSET if it cannot be read."""
    if not device.startswith("cuda"):
        return _resident_bytes
    read = _reader(device)

    def allocated_bytes() -> int:
        found = int(UNSET["i64"])
        with failing_open("recorder.memory"):
            found = int(read().get("allocated_bytes.all.current", found))
        return found

    return allocated_bytes


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return int(UNSET["i64"])


class AllocatorRetries:
    """Retries and peak of one device's allocator; on a CPU there are none."""

    def __init__(self, device: str, read: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self._read = read or (_reader(device) if device.startswith("cuda") else None)
        self._known = 0
        self._peak_bytes = 0

    def _new_retries(self, stats: Mapping[str, Any]) -> dict[str, int] | None:
        """Retries since the last call, peak of allocated bytes, and bytes reserved now; None without retries."""
        count = int(stats.get("num_alloc_retries", 0))
        new, self._known = count - self._known, count
        if new <= 0:
            return None
        sizes = {"allocated_bytes": "allocated_bytes.all.peak", "reserved_bytes": "reserved_bytes.all.current"}
        # A custom allocator may lack these counts. A missing count is left out, because it does not mean 0 bytes.
        return {"num_retries": new} | {name: int(stats[key]) for name, key in sizes.items() if key in stats}

    def report(self, event: Callable[..., None]) -> None:
        """Write an event `allocation_retries` if there are new ones, and `memory_peak` when the peak has grown, without
        waiting for the device.
        """
        if self._read is not None:
            with failing_open("recorder.allocator"):
                stats = self._read()
                if retries := self._new_retries(stats):
                    event(event_kinds.ALLOCATION_RETRIES, **retries)
                peak = int(stats.get("allocated_bytes.all.peak", 0))
                if peak > self._peak_bytes * PEAK_GROWTH:
                    self._peak_bytes = peak
                    event(event_kinds.MEMORY_PEAK, allocated_bytes=peak)


def _reader(device: str) -> Callable[[], Mapping[str, Any]]:
    import torch

    def read() -> Mapping[str, Any]:
        stats: Mapping[str, Any] = torch.cuda.memory_stats(device)
        return stats

    return read
