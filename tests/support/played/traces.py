"""Profiled steps of a played run: traces as torch.profiler writes them, read and compared with the truth.

exposed_points, own_ratio = compare_traces(played, folder)
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from store.readers.traces.kineto import read_trace
from store.readers.traces.rank_traces import breakdown
from tests.support.played.recording import Played
from tests.support.played.streams import Begin, Machine, World

__all__ = ["compare_traces", "write_traces"]

PROFILED_STEPS = 12
_KERNELS = {"send": "SendRecv", "recv": "SendRecv"}


def write_traces(played: Played, folder: Path) -> list[Path]:
    """Write a trace of the last steps of each rank."""
    folder.mkdir()
    paths = []
    for machine in played.world.machines:
        path = folder / f"rank{machine.rank}.pt.trace.json"
        world_size = len(played.world.machines)
        facts = {"rank": machine.rank, "world_size": world_size, "backend": "nccl"}
        path.write_text(json.dumps({"distributedInfo": facts, "traceEvents": _events(machine, played.world)}))
        paths.append(path)
    return paths


def _windows(machine: Machine) -> list[tuple[int, int, int]]:
    """(step, begin, end) of the profiled steps, by the host's clock: from begin to begin."""
    begins = [(op.step, ns) for ns, op in machine.log if isinstance(op, Begin)]
    windows = [(step, ns, after) for (step, ns), (_, after) in pairwise(begins)]
    return windows[-PROFILED_STEPS:]


def _events(machine: Machine, world: World) -> list[dict[str, Any]]:
    windows = _windows(machine)
    first, last = windows[0][1], windows[-1][2]

    def event(name: str, category: str, begin: int, end: int, thread: int) -> dict[str, Any]:
        times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
        return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": thread, **times}

    events = [event(f"ProfilerStep#{step}", "user_annotation", begin, end, 1) for step, begin, end in windows]
    for kernel in machine.kernels:
        if kernel.waits_for is None and kernel.end_ns is not None and kernel.end_ns > first and kernel.start_ns < last:
            events.append(event("ampere_bf16_gemm", "kernel", kernel.start_ns, kernel.end_ns, 7))
    for call in world.calls:
        if machine.rank in call.end_ns:
            begin, end = call.start_ns[machine.rank], call.end_ns[machine.rank]
            if end > first and begin < last:
                op = call.ops[machine.rank][0]
                events.append(event(f"ncclDevKernel_{_KERNELS.get(op, op)}", "kernel", begin, end, 20))
    return events


def compare_traces(played: Played, folder: Path) -> tuple[float, float]:
    """Largest difference over all ranks: exposed communication (points of the step), own work (relative)."""
    exposed_points, own_ratio = 0.0, 0.0
    for machine, path in zip(played.world.machines, write_traces(played, folder), strict=True):
        parts = breakdown(read_trace(path))
        total = float(parts["step"].sum())
        true_exposed, true_own = _truth(machine)
        exposed_points = max(exposed_points, 100 * abs(float(parts["exposed"].sum()) - true_exposed) / total)
        own_ratio = max(own_ratio, abs(float(parts["compute"].sum()) - true_own) / true_own)
    return exposed_points, own_ratio


def _truth(machine: Machine) -> tuple[float, float]:
    """Milliseconds for which the compute stream stalled for a call, and for which it computed, in the windows."""
    windows = np.array([(begin, end) for _, begin, end in _windows(machine)])
    sums = {True: 0.0, False: 0.0}
    for kernel in machine.kernels:
        if kernel.end_ns is not None:
            inside = np.minimum(kernel.end_ns, windows[:, 1]) - np.maximum(kernel.start_ns, windows[:, 0])
            sums[kernel.waits_for is not None] += float(np.maximum(inside, 0).sum()) / 1e6
    return sums[True], sums[False]
