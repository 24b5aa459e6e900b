"""Kineto traces of a CUDA run: kernels, NCCL's on a stream of their own, host marks that run ahead of the device.

traces = [trace(rank, steps=12, compute_ms=40 if rank == 3 else 30) for rank in range(4)]

Field by field as `torch.profiler` exports them. A step is compute, an all-reduce that hides in it, and one that nothing
hides. Ranks leave the all-reduce together; who comes late spends less time in it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN_MS = 4.0
TRANSFER_MS = 3.0


def trace(
    rank: int,
    *,
    world_size: int = 1,
    steps: int = 12,
    compute_ms: Callable[[int, int], float] = lambda rank, step: 30.0,
    device_marks: bool = True,
    launch_ahead_ms: float = 5.0,
    seed: int = 0,
) -> dict[str, Any]:
    """One rank's trace. `compute_ms(rank, step)` is the truth of every rank, from which the waiting follows."""
    noise = np.exp(0.003 * np.random.default_rng(seed).standard_normal((world_size, steps)))
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "ts": 0, "args": {"name": "python"}}]
    now_us = 1e9 + 12345.0 * rank  # every rank has a clock of its own
    for step in range(steps):
        times = [compute_ms(other, step) * noise[other, step] for other in range(world_size)]
        own_us, slowest_us = 1e3 * times[rank], 1e3 * max(times)
        # A transfer that hides in the compute, then the one that everybody waits in.
        end_us = now_us + slowest_us + 1e3 * TRANSFER_MS
        host_us = now_us - 1e3 * launch_ahead_ms
        events += [
            _event("user_annotation", f"ProfilerStep#{step}", host_us, end_us - now_us),
            _event("cpu_op", "aten::mm", host_us, 50.0),
            _event("user_annotation", "nccl:all_reduce", host_us + 60, 10.0),
            _kernel("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", now_us, own_us / 2, 7),
            _kernel("void at::native::vectorized_elementwise_kernel<4, float>", now_us + own_us / 2, own_us / 2, 7),
            _kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                    now_us + own_us - 1e3 * HIDDEN_MS, 1e3 * HIDDEN_MS, 20),
            _kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                    now_us + own_us, end_us - now_us - own_us, 20),
        ]  # fmt: skip
        if device_marks:
            for stream in (7, 20):
                events.append(
                    _event("gpu_user_annotation", f"ProfilerStep#{step}", now_us, end_us - now_us, tid=stream)
                )
        now_us = end_us
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": rank, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size, "pg_count": 1, "pg_config": []},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1_790_857_026_000_000_000,
        "traceEvents": events,
        "traceName": f"/tmp/rank{rank}.pt.trace.json",
    }


def write(folder: Path, made: dict[str, Any], name: str, *, packed: bool = False) -> None:
    """Write a trace as the profiler's handler names it."""
    folder.mkdir(parents=True, exist_ok=True)
    blob = json.dumps(made).encode()
    path = folder / f"{name}.pt.trace.json{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(blob) if packed else blob)


def _event(category: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur,
            "args": {"External id": 1}}  # fmt: skip


def _kernel(name: str, ts: float, dur: float, stream: int) -> dict[str, Any]:
    args = {"device": 0, "stream": stream, "correlation": 1, "grid": [1, 1, 1], "block": [128, 1, 1]}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}
