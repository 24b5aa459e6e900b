"""The devices of a node, one per rank, and which of them are excluded because ranks kept dying on them.

    devices = Devices(4, max_failures=3)
    devices.count_failure(2)       # the rank on the third device in use died; True if it failed too often
    devices.exclude(2)
    devices.in_use                 # (0, 1, 3)
    devices.environment()          # {"CUDA_VISIBLE_DEVICES": "0,1,3"}; empty on a CPU

A death counts only if hardware can have caused it (`trainer.launcher.device_at_fault`). An exception or a failed
allocation has another cause. On a CPU a device is just an index, and is excluded in the same way.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

__all__ = ["Devices", "visible_devices"]

GPU_FAILURES = 3
"""Two failures may be due to the same batch; a device that fails three times rarely recovers."""


def visible_devices(devices: Path = Path("/dev")) -> list[str]:
    """Names of the GPUs that ranks may use: CUDA_VISIBLE_DEVICES as CUDA interprets it; if it is not set, all GPUs of
    the machine.

    An empty list hides every device, and the first invalid name ends the list.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(devices.glob("nvidia[0-9]*")))
    if named is None:
        return [str(number) for number in range(present)]
    found: list[str] = []
    for name in (part.strip() for part in named.split(",")):
        is_number = name.isdigit() and (not present or int(name) < present)
        if not (is_number or name.startswith(("GPU-", "MIG-"))) or name in found:
            break
        found.append(name)
    return found


class Devices:
    """The devices of one launch and their failures."""

    def __init__(self, count: int, *, max_failures: int = -1) -> None:
        self._names = visible_devices()
        self.has_gpus = len(self._names) >= count
        self._limit = max_failures if max_failures >= 0 else GPU_FAILURES if self.has_gpus else 0
        self._failures: Counter[int] = Counter()
        self.in_use: tuple[int, ...] = tuple(range(count))

    def count_failure(self, place: int) -> bool:
        """Count a death on the device at this index of `in_use`; returns True if there were too many."""
        device = self.in_use[place]
        self._failures[device] += 1
        return 0 < self._limit <= self._failures[device]

    def failures(self, device: int) -> int:
        return self._failures[device]

    def exclude(self, device: int) -> None:
        self.in_use = tuple(other for other in self.in_use if other != device)

    def name(self, device: int) -> str:
        """Name for display: `cuda:2`, or `slot 2` on a CPU."""
        return f"cuda:{self._names[device]}" if self.has_gpus else f"slot {device}"

    def environment(self) -> dict[str, str]:
        """Environment variables that hide all other devices from the ranks."""
        if not self.has_gpus:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._names[device] for device in self.in_use)}
