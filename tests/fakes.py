"""Fakes for several test files: an NVML without a GPU, and the death of a process simulated within it.

nvml = FakeNvml()
nvml.failing["nvmlDeviceGetPowerUsage"] = nvml.NVML_ERROR_NOT_SUPPORTED
nvml.events.put((79, "GPU-1"))
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

__all__ = ["FakeNvml", "ProcessEnd"]


class ProcessEnd(BaseException):
    """Simulates SIGKILL at a point of the code: `except Exception` does not catch it, and shared memory stays."""


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(
            {1: "Uninitialized", 3: "Not Supported", 10: "Timeout", 15: "GPU is lost"}.get(value, "Unknown")
        )
        self.value = value


class FakeNvml:
    """The part of nvidia-ml-py that `watch.health.nvml` uses, with two devices; functions can be made to fail."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 3, 10, 15
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    NVML_NVLINK_ERROR_COUNT = 4
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_GPM_METRICS_GET_VERSION = 1
    nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError = 8, 2

    def __init__(self, devices: tuple[str, ...] = ("GPU-0", "GPU-1")) -> None:
        self.devices = devices
        self.failing: dict[str, int] = {}
        self.asked: Counter[str] = Counter()
        self.hangs = threading.Event()  # while it is set, every call blocks
        self.released = threading.Event()
        self.events: queue.Queue[tuple[int, str]] = queue.Queue()
        self.freed = 0
        self.slices: dict[str, list[str | None]] = {}  # MIG devices by GPU; None: an empty slot

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("nvml") or not callable(value):
            return value
        self.asked[name] += 1

        def called(*arguments: Any) -> Any:
            if self.hangs.is_set():
                self.released.wait(60)
            if name in self.failing:
                raise NVMLError(self.failing[name])
            return value(*arguments)

        return called

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.devices[index]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle not in self.slices:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return len(self.slices[handle])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if (found := self.slices[handle][index]) is None:
            raise NVMLError(6)
        return found

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=70 << 30, total=80 << 30)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 64

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 612_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return 5_000_000

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        return 12 if kind == self.NVML_MEMORY_ERROR_TYPE_CORRECTED else 0

    def nvmlDeviceGetRemappedRows(self, handle: str) -> list[int]:
        return [1, 2, 0, 0]

    def nvmlDeviceGetPcieReplayCounter(self, handle: str) -> int:
        return 3

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= 4:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return 1

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: str, link: int, counter: int) -> int:
        return 1

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=handle == "GPU-0")

    def nvmlGpmSampleAlloc(self) -> object:
        return object()

    def nvmlGpmSampleGet(self, handle: str, sample: object) -> None: ...

    def nvmlGpmSampleFree(self, sample: object) -> None:
        self.freed += 1

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0, nvmlReturn=0) for _ in range(8)])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = 10.0 * metric.metricId

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceGetSupportedEventTypes(self, handle: str) -> int:
        return 0xFF

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: object) -> None: ...

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        try:
            code, device = self.events.get(timeout=timeout_ms / 1e3)
        except queue.Empty:
            raise NVMLError(self.NVML_ERROR_TIMEOUT) from None
        kind = self.nvmlEventTypeDoubleBitEccError if code == 48 else self.nvmlEventTypeXidCriticalError
        return SimpleNamespace(device=device, eventType=kind, eventData=code)
