"""A trace of PyTorch's profiler (Kineto): one rank's `*.pt.trace.json[.gz]`, reduced to when it did what.

    trace = read_trace(Path("traces/worker0.pt.trace.json.gz"))
    trace.steps, trace.begin_us, trace.end_us      # ProfilerStep#: number, window
    trace.compute, trace.communication             # disjoint intervals, microseconds

* With device events, compute is every kernel and copy that is not NCCL's, communication NCCL's kernels, and the windows
  are those of the device where the trace has them (the host runs ahead of it).
* Without (CPU, gloo), compute is every operator but those that issue communication, and communication the backend's
  spans (`gloo:all_reduce`), which run on threads of their own.
* Events are read one at a time; nothing but two numbers an event of interest is kept.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from store.arrays import Floats, Ints
from store.readers.external_files import SourceError, rank_of_name, unpacked
from store.readers.intervals import Spans, union
from store.readers.json_stream import members

__all__ = ["COMMUNICATION_KERNEL", "MAX_STEPS", "RankTrace", "read_trace"]

_STEP = re.compile(r"ProfilerStep#(\d{1,9})$")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "hpu_op", "mtia_ccp_events", "privateuse1_kernel")
"""Categories of what a device does, in lower case: CUDA and ROCm, those of 2021, HPU, MTIA."""
_LAUNCHES = (
    "cuda_runtime",
    "hip_runtime",
    "cuda_driver",
    "runtime",
    "mtia_runtime",
    "xpu_runtime",
    "privateuse1_runtime",
)
_HOST = (
    *_LAUNCHES, "cpu_op", "operator", "user_annotation", "gpu_user_annotation", "python_function", "python", "trace",
    "overhead", "ac2g", "fwdbwd", "async_cpu_to_gpu", "async_gpu", "async", "cpu_instant_event", "cuda_sync",
    "cuda_event", "external_correlation", "cuda_profiler_range", "privateuse1_driver", "cpu", "async_npu", "cpu_op_fwd",
    "glow_runtime", "mtia_insight",
)  # fmt: skip
COMMUNICATION_KERNEL = re.compile(r"nccl|rccl|oneccl|hccl|hcom_", re.IGNORECASE)
_ASCEND = {"Computing": "kernel", "Communication": "nccl_kernel"}
"""Spans of the process `Overlap Analysis` in `trace_view.json` of Ascend's profiler."""
SHORT_MARK = 0.1
"""A mark of a step that is shorter than this share of the distance to the next is a point: ROCm's last 16 us."""
_COMMUNICATION_SPAN = re.compile(r"(gloo|ucc|mpi|xccl|nccl):")
_ISSUES = ("c10d::", "record_param_comms", "gloo:", "nccl:", "_c10d_functional::", "c10d_functional::")
"""Operators that hand a collective over; how long it takes is in the backend's own span or kernel."""
_PIPELINE = re.compile(r"(^|_)(pp|pipeline)", re.IGNORECASE)
MAX_US = 1e17
MAX_STEPS = 100_000
MAX_UNKNOWN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank. Times are microseconds of the trace's own clock, which no other rank shares."""

    rank: int
    path: Path
    world_size: int | None
    stage: int
    """Place in the pipeline where the trace names such a group, else 0: ranks of one stage do the same work."""
    device: str
    """What the times are of: cuda (any device with kernels) or cpu."""
    marked: bool
    """Whether it has `ProfilerStep#` marks; without, the whole trace is one step, number 0."""
    steps: Ints
    begin_us: Floats
    end_us: Floats
    compute: Spans
    communication: Spans
    data: Spans
    num_events: int
    damaged_events: int
    problem: str = ""
    """Why the trace was not read to its end; what came before is here."""


@dataclass(slots=True)
class _Collected:
    launches: tuple[array[int], array[float]] = field(default_factory=lambda: (array("q"), array("d")))
    """Correlation and time of the host's calls that start something on the device."""
    started: tuple[array[int], array[float], array[float]] = field(
        default_factory=lambda: (array("q"), array("d"), array("d"))
    )
    """Correlation, begin and end of what the device did."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Categories that are of no list, and how many spans they have."""
    processes: dict[Any, str] = field(default_factory=dict)
    device: dict[str, tuple[array[float], array[float]]] = field(default_factory=dict)
    num_events: int = 0
    damaged: int = 0
    host_steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    device_steps: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(self, kind: str, begin: float, end: float) -> None:
        begins, ends = self.device.setdefault(kind, (array("d"), array("d")))
        begins.append(begin)
        ends.append(end)

    def spans(self, *kinds: str) -> Spans:
        found = [self.device[kind] for kind in kinds if kind in self.device]
        begins = [np.frombuffer(begin) for begin, _ in found] or [np.zeros(0)]
        ends = [np.frombuffer(end) for _, end in found] or [np.zeros(0)]
        return union(np.concatenate(begins), np.concatenate(ends))


def read_trace(path: Path, *, is_only: bool = False) -> RankTrace:
    """Read one trace. Raises SourceError where nothing of it can be used.

    A trace that `is_only` one needs no rank: it is rank 0 unless it or its name says otherwise.
    """
    collected = _Collected()
    about: Any = None
    problem = ""
    try:
        for key, value, is_item in members(unpacked(path), {"traceEvents"}):
            if is_item:
                _event(value, collected)
            elif key == "distributedInfo":
                about = value
    except SourceError as error:
        problem = str(error)
    if not collected.num_events:
        raise SourceError(problem or "holds no events")
    about = about if isinstance(about, dict) else {}
    rank = _int(about.get("rank"))
    if rank is None:
        named = "rank" in path.name.lower()
        rank = rank_of_name(path) if named or not is_only else 0
    if rank is None:
        raise SourceError("tells no rank, neither inside (distributedInfo) nor by its name")
    on_device = "kernel" in collected.device or "nccl_kernel" in collected.device
    device = "cuda" if on_device else "cpu"
    if not on_device and collected.unknown:  # a device of a kind that is not known: what it does is all one
        device, count = max(collected.unknown.items(), key=lambda item: item[1])
        collected.device["kernel"] = collected.device.pop(f"?{device}")
        problem = problem or f"has {count:,} events of the unknown category {device!r}, taken for its device's compute"
        on_device = True
    steps, begin, end = _windows(collected, on_device)
    if len(steps) == 0:
        raise SourceError("holds no operator, kernel or step")
    return RankTrace(
        rank=rank,
        path=path,
        world_size=_int(about.get("world_size")),
        stage=_stage(about, rank),
        device=device,
        marked=bool(collected.host_steps or collected.device_steps),
        steps=steps,
        begin_us=begin,
        end_us=end,
        compute=collected.spans("kernel", "copy") if on_device else collected.spans("operator"),
        communication=collected.spans("nccl_kernel") if on_device else collected.spans("backend"),
        data=collected.spans("data"),
        num_events=collected.num_events,
        damaged_events=collected.damaged,
        problem=problem,
    )


def _event(event: Any, into: _Collected) -> None:
    if not isinstance(event, dict):
        into.damaged += 1
        return
    into.num_events += 1
    if event.get("ph") == "M" and event.get("name") == "process_name":
        _process(event, into)
    if event.get("ph") != "X":
        return
    category, name = event.get("cat", ""), event.get("name")
    begin, duration = _time(event.get("ts")), _time(event.get("dur", 0))
    if not isinstance(category, str) or not isinstance(name, str) or begin is None or duration is None or duration < 0:
        into.damaged += 1
        return
    _span(event, category.lower(), name, begin, begin + duration, into)


def _span(event: Mapping[str, Any], category: str, name: str, begin: float, end: float, into: _Collected) -> None:
    if into.processes.get(event.get("pid")) == "Overlap Analysis":
        if name in _ASCEND:
            into.add(_ASCEND[name], begin, end)
        return
    if category in _DEVICE:
        is_kernel = not category.endswith(("memcpy", "memset"))
        communication = is_kernel and COMMUNICATION_KERNEL.search(name[:200])
        into.add("nccl_kernel" if communication else "kernel" if is_kernel else "copy", begin, end)
        if (correlation := _correlation(event)) is not None:
            into.started[0].append(correlation)
            into.started[1].append(begin)
            into.started[2].append(end)
    elif category in _LAUNCHES:
        if (correlation := _correlation(event)) is not None:
            into.launches[0].append(correlation)
            into.launches[1].append(begin)
    elif category in ("cpu_op", "operator"):
        if _COMMUNICATION_SPAN.match(name):
            into.add("backend", begin, end)
        elif not name.startswith(_ISSUES) and not _STEP.match(name):
            into.add("operator", begin, end)
        elif _STEP.match(name):  # traces of 2021 have the marks among the operators
            _annotation("user_annotation", name[:200], begin, end, into)
    elif category in ("user_annotation", "gpu_user_annotation") or _STEP.match(name):
        _annotation(category if category == "gpu_user_annotation" else "user_annotation", name[:200], begin, end, into)
    elif category and category not in _HOST and len(into.unknown) < MAX_UNKNOWN:
        into.unknown[category] = into.unknown.get(category, 0) + 1
        into.add(f"?{category}", begin, end)


def _process(event: Mapping[str, Any], into: _Collected) -> None:
    about, pid = event.get("args"), event.get("pid")
    if isinstance(about, dict) and isinstance(about.get("name"), str) and isinstance(pid, (int, str)):
        into.processes[pid] = about["name"][:100]


def _correlation(event: Mapping[str, Any]) -> int | None:
    about = event.get("args")
    found = about.get("correlation", about.get("correlation id")) if isinstance(about, dict) else None
    return found if isinstance(found, int) and 0 < found < 2**62 else None


def _annotation(category: str, name: str, begin: float, end: float, into: _Collected) -> None:
    step = _STEP.match(name)
    if step:
        steps = into.host_steps if category == "user_annotation" else into.device_steps
        number = int(step[1])
        if number in steps:  # on each stream of the device
            steps[number] = (min(begin, steps[number][0]), max(end, steps[number][1]))
        elif len(steps) < MAX_STEPS:
            steps[number] = (begin, end)
    elif category == "user_annotation" and _COMMUNICATION_SPAN.match(name):
        into.add("backend", begin, end)
    elif category == "user_annotation" and name.startswith("enumerate(DataLoader)"):
        into.add("data", begin, end)


def _windows(collected: _Collected, on_device: bool) -> tuple[Ints, Floats, Floats]:
    """Number, begin and end of each step: by the device's own marks, else by what each step of the host started."""
    device = _marks(collected.device_steps)
    host = _marks(collected.host_steps)
    if on_device and device is not None:
        steps, begin, end = device
        # a step's last kernel ends before the next one's first begins, or after: no gap
        end[:-1] = np.maximum(begin[1:], begin[:-1])
        return steps, begin, end
    if host is None:
        kinds = ("kernel", "copy", "nccl_kernel") if on_device else ("operator", "backend")
        begin, end = collected.spans(*kinds)
        return np.zeros(min(len(begin), 1), dtype=np.int64), begin[:1], end[-1:]
    return (_by_correlation(collected, host) if on_device else None) or host


def _marks(steps: Mapping[int, tuple[float, float]]) -> tuple[Ints, Floats, Floats] | None:
    """Marks of steps as windows; one that is a point lasts until the next, and the last point is left out."""
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


def _by_correlation(collected: _Collected, host: tuple[Ints, Floats, Floats]) -> tuple[Ints, Floats, Floats] | None:
    """Windows of the device, from the first kernel that a step's host started to the first of the next step.

    None where the trace does not say which call started which kernel.
    """
    steps, begin, _ = host
    calls, called = np.frombuffer(collected.launches[0], dtype=np.int64), np.frombuffer(collected.launches[1])
    kernels = np.frombuffer(collected.started[0], dtype=np.int64)
    starts, ends = np.frombuffer(collected.started[1]), np.frombuffer(collected.started[2])
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


def _stage(about: Mapping[str, Any], rank: int) -> int:
    groups = about.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and isinstance(group.get("pg_desc"), str) and _PIPELINE.search(group["pg_desc"]):
            ranks = group.get("ranks")
            if isinstance(ranks, list) and rank in ranks:
                return ranks.index(rank)
    return 0


def _time(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and -MAX_US < value < MAX_US:
        return float(value)
    return None  # NaN too: it is in no range


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1_000_000 else None
