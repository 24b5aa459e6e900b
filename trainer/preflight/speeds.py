"""Sustained speed of a device: matrix products and memory bandwidth, each measured alone over a fixed time.

    speed = device_speed(torch.device("cpu"))
    speed.matmul_flops_per_s, speed.memory_bytes_per_s, speed.core_wait_ratio

The best of three windows counts: system activity in one window is not a fault of the device, while a shared core or a
throttled clock shows in all of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["DeviceSpeed", "device_speed"]

WINDOW_S = 0.12
NUM_WINDOWS = 3
GPU_DIMENSION = 8192
CPU_DIMENSION = 512
GPU_COPY_BYTES = 1 << 30
CPU_COPY_BYTES = 1 << 26
"""Bytes of the copied tensor on a CPU, more than the last-level cache that one core uses."""
MAX_THREADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """Operations per second, bytes read and written per second, and the share of time that the thread waited for a
    core."""

    matmul_flops_per_s: float
    memory_bytes_per_s: float
    core_wait_ratio: float | None


def device_speed(device: torch.device) -> DeviceSpeed:
    """Measure the device for about a second; a CPU is measured with all cores that this process may use."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(min(MAX_THREADS, len(os.sched_getaffinity(0))))
    try:
        return _measured(device)
    finally:
        torch.set_num_threads(threads)


def _measured(device: torch.device) -> DeviceSpeed:
    on_gpu = device.type == "cuda"
    dimension = GPU_DIMENSION if on_gpu else CPU_DIMENSION
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = (torch.ones(dimension, dimension, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    started_ns, waited_ns = time.perf_counter_ns(), _waited_ns()
    products_per_s = _best_rate(lambda: torch.mm(a, b, out=product), device)
    ended_waiting_ns, ended_ns = _waited_ns(), time.perf_counter_ns()
    source = torch.empty((GPU_COPY_BYTES if on_gpu else CPU_COPY_BYTES) // 4, device=device, dtype=torch.float32)
    source.fill_(1.0)
    copy = torch.empty_like(source)
    copies_per_s = _best_rate(lambda: copy.copy_(source), device)
    waits = None
    if waited_ns is not None and ended_waiting_ns is not None:
        waits = min(1.0, (ended_waiting_ns - waited_ns) / (ended_ns - started_ns))
    return DeviceSpeed(
        matmul_flops_per_s=2.0 * dimension**3 * products_per_s,
        memory_bytes_per_s=2.0 * source.nbytes * copies_per_s,
        core_wait_ratio=waits,
    )


def _best_rate(work: Callable[[], object], device: torch.device) -> float:
    """Calls per second in the best of several windows, after one warm-up call that is not counted."""
    work()
    _synchronise(device)
    best = 0.0
    for _ in range(NUM_WINDOWS):
        calls, started = 0, time.perf_counter()
        elapsed = 0.0
        while elapsed < WINDOW_S:
            work()
            _synchronise(device)
            calls, elapsed = calls + 1, time.perf_counter() - started
        best = max(best, calls / elapsed)
    return best


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _waited_ns() -> int | None:
    """Nanoseconds for which the main thread was ready but had no core, as counted by the scheduler."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/self/schedstat").read_text().split()[1])
    return None
