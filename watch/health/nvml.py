"""Readings and XID errors of NVIDIA GPUs through nvidia-ml-py.

    if has_driver():
        Nvml().read()[0].values["sm_clock_hertz"]
        Xids().wait(1.0)

A field that a device does not support is queried once and then omitted. A field that fails for another reason is
omitted from that reading only. Any call into the driver may block for seconds, or forever if a device has fallen off
the bus. So call it in a daemon thread, and join this thread only with a timeout.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from watch.health.device import Reading, ReadingError, Xid

__all__ = ["Nvml", "Xids", "has_driver"]

_MAX_LINKS = 18
_GPM = {"sm_active_ratio": 2, "tensor_active_ratio": 5, "memory_bandwidth_ratio": 10}
"""Column -> ID of NVML's GPM metric (percent): SM_UTIL, ANY_TENSOR_UTIL, DRAM_BW_UTIL."""


class Nvml:
    """All GPUs of the node, whichever process uses them. `library`: nvidia-ml-py, or a module compatible with it."""

    name = "NVML"

    def __init__(self, library: Any = None) -> None:
        self._nvml: Any = library or importlib.import_module("pynvml")
        self._devices: dict[str, Any] | None = None
        self._unsupported: set[tuple[str, str]] = set()
        self._gpm_samples: dict[str, Any] = {}

    def read(self) -> Sequence[Reading]:
        """Return one reading per device. Raises ReadingError if the driver does not answer."""
        if self._devices is None:
            self._devices = _devices(self._nvml, with_mig=True)
        return [Reading(uuid, self._values(uuid, handle)) for uuid, handle in self._devices.items()]

    def _values(self, uuid: str, handle: Any) -> dict[str, float]:
        values: dict[str, float] = {}
        for columns, query in self._queries(uuid, handle):
            if (uuid, columns[0]) in self._unsupported:
                continue
            try:
                answer = query()
            except self._nvml.NVMLError as error:
                if getattr(error, "value", None) == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                    self._unsupported.add((uuid, columns[0]))
                continue
            except AttributeError:  # this nvidia-ml-py or driver is too old to have the function
                self._unsupported.add((uuid, columns[0]))
                continue
            answers = answer if isinstance(answer, tuple) else (answer,)
            values |= {column: value for column, value in zip(columns, answers, strict=True) if value is not None}
        return values

    def _queries(self, uuid: str, handle: Any) -> list[tuple[tuple[str, ...], Callable[[], Any]]]:
        nvml = self._nvml

        def memory() -> tuple[int, int]:
            info = nvml.nvmlDeviceGetMemoryInfo(handle)
            return int(info.used), int(info.total)

        def errors(kind: int) -> int:
            return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))

        def remapped() -> tuple[int, bool, bool]:
            corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
            return corrected + uncorrected, bool(pending), bool(failed)

        def reasons() -> int:
            query = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # the newer name
            return int((query or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))

        return [
            (("gpu_utilization_ratio",), lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            (("memory_used_bytes", "memory_total_bytes"), memory),
            (("temperature_celsius",), lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            (("power_watts",), lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            (("energy_joules",), lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
            (("sm_clock_hertz",), lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6),
            (("throttle_reasons",), reasons),
            (("ecc_corrected_total",), lambda: errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)),
            (("ecc_uncorrected_total",), lambda: errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)),
            (("remapped_rows_total", "remap_pending", "remap_failed"), remapped),
            (("pcie_replay_total",), lambda: int(nvml.nvmlDeviceGetPcieReplayCounter(handle))),
            (("nvlink_errors_total",), lambda: self._link_errors(handle)),
            (tuple(_GPM), lambda: self._gpm(uuid, handle)),
        ]

    def _link_errors(self, handle: Any) -> int:
        """Sum of all error counters of all active links. Raises AttributeError if there are no links or no counters."""
        total, num_counters = 0, 0
        for link in range(_MAX_LINKS):
            try:
                if not self._nvml.nvmlDeviceGetNvLinkState(handle, link):
                    continue
            except self._nvml.NVMLError:
                break  # the device has no link with this number
            for counter in range(self._nvml.NVML_NVLINK_ERROR_COUNT):
                with contextlib.suppress(self._nvml.NVMLError):
                    total += int(self._nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter))
                    num_counters += 1
        if not num_counters:
            raise AttributeError("no NVLink, or no NVLink with error counters")
        return total

    def _gpm(self, uuid: str, handle: Any) -> tuple[float | None, ...]:
        """Utilisation shares since the last reading, on Hopper and later; None for the first reading."""
        nvml = self._nvml
        if uuid not in self._gpm_samples and not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise AttributeError("no GPM")
        sample = nvml.nvmlGpmSampleAlloc()
        try:
            nvml.nvmlGpmSampleGet(handle, sample)
        except nvml.NVMLError:
            nvml.nvmlGpmSampleFree(sample)
            raise
        before, self._gpm_samples[uuid] = self._gpm_samples.get(uuid), sample
        if before is None:
            return (None,) * len(_GPM)
        try:
            query = nvml.c_nvmlGpmMetricsGet_t()
            query.version = nvml.NVML_GPM_METRICS_GET_VERSION
            query.numMetrics = len(_GPM)
            query.sample1, query.sample2 = before, sample
            for i, number in enumerate(_GPM.values()):
                query.metrics[i].metricId = number
            nvml.nvmlGpmMetricsGet(query)
            return tuple(
                query.metrics[i].value / 100 if query.metrics[i].nvmlReturn == 0 else None for i in range(len(_GPM))
            )
        finally:
            nvml.nvmlGpmSampleFree(before)


class Xids:
    """XID errors and double-bit ECC errors of all devices."""

    def __init__(self, library: Any = None) -> None:
        self._nvml: Any = library or importlib.import_module("pynvml")
        self._set: Any = None

    def _listen(self) -> None:
        nvml, devices = self._nvml, _devices(self._nvml)
        try:
            self._set = nvml.nvmlEventSetCreate()
            for handle in devices.values():
                types = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
                types &= nvml.nvmlDeviceGetSupportedEventTypes(handle)
                nvml.nvmlDeviceRegisterEvents(handle, types, self._set)
        except nvml.NVMLError as error:
            raise ReadingError(f"XID errors cannot be received: {error}") from None

    def wait(self, timeout_s: float) -> Sequence[Xid]:
        """Wait for the next error; empty if none occurs in time. Raises ReadingError if no more can be received."""
        if self._set is None:
            self._listen()
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._set, int(timeout_s * 1e3))
            device = _text(self._nvml.nvmlDeviceGetUUID(event.device))
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_TIMEOUT:
                return []
            raise ReadingError(f"XID errors are no longer received: {error}") from None
        double_bit = event.eventType & self._nvml.nvmlEventTypeDoubleBitEccError
        return [Xid(48 if double_bit else int(event.eventData), device)]  # 48: a double-bit error


def has_driver() -> bool:
    """Return True if this machine has NVIDIA's driver. Reads only the file system."""
    return any(Path(place).exists() for place in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"))


def _devices(nvml: Any, *, with_mig: bool = False) -> dict[str, Any]:
    """Return {UUID: handle} of all GPUs and, with `with_mig`, of their MIG devices. Raises ReadingError."""
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        if with_mig:
            handles += [handle for device in handles.copy() for handle in _mig_devices(nvml, device)]
        return {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    except nvml.NVMLError as error:
        raise ReadingError(f"NVML: {error}") from None


def _mig_devices(nvml: Any, device: Any) -> list[Any]:
    """Handles of a GPU's MIG devices: ranks run on these, with only part of the GPU's memory."""
    try:
        if nvml.nvmlDeviceGetMigMode(device)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(device)
    except (nvml.NVMLError, AttributeError):
        return []
    found = []
    for index in range(count):
        with contextlib.suppress(nvml.NVMLError):  # no MIG device at this index
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index))
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
