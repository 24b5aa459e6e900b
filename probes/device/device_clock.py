"""Place moments of a device on its host's clock, from stamps alone.

    clock = DeviceClock()
    clock.lag_ns(host_ns=1_000, device_ns=0)      # 0: the first stamp is taken for one that ran at once
    clock.host_ns(device_ns=500)                  # 1500

A device runs a stamp after its host enqueued it, so `host - device` of any stamp is at most the offset of the clocks,
and is the offset where the device was idle and ran the stamp at once. The largest seen is the offset. A host that never
lets its device run dry gives none for long: clocks drift meanwhile, so what was seen counts less with age.
"""

from __future__ import annotations

__all__ = ["DeviceClock"]

DRIFT_PPM = 20
"""Most that the clocks of a device and its host drift apart. Crystals are specified to some 10 to 20."""


class DeviceClock:
    """Offset of one device's clock. Times in nanoseconds."""

    __slots__ = ("_offset_ns", "_seen_ns")

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self._seen_ns = 0

    def lag_ns(self, host_ns: int, device_ns: int) -> int:
        """Time from a stamp's enqueuing to its run: 0 where the device waited for its host."""
        least = host_ns - device_ns
        offset = self._offset(device_ns)
        if offset is None or least >= offset:
            self._offset_ns, self._seen_ns = least, device_ns
            return 0
        return offset - least

    def host_ns(self, device_ns: int) -> int:
        """The moment on the host's clock; of the device's own before the first stamp."""
        return device_ns + (self._offset(device_ns) or 0)

    def _offset(self, device_ns: int) -> int | None:
        if self._offset_ns is None:
            return None
        return self._offset_ns - max(0, device_ns - self._seen_ns) * DRIFT_PPM // 1_000_000
