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

__all__ = ["RankTrace", "read_trace"]

_STEP = re.compile(r"ProfilerStep#(\d{1,9})$")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COMMUNICATION_KERNEL = re.compile(r"nccl|rccl|oneccl", re.IGNORECASE)
_COMMUNICATION_SPAN = re.compile(r"(gloo|ucc|mpi|xccl|nccl):")
_ISSUES = ("c10d::", "record_param_comms", "gloo:", "nccl:", "_c10d_functional::", "c10d_functional::")
"""Operators that hand a collective over; how long it takes is in the backend's own span or kernel."""
_PIPELINE = re.compile(r"(^|_)(pp|pipeline)", re.IGNORECASE)
MAX_US = 1e17
MAX_STEPS = 100_000


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


def read_trace(path: Path) -> RankTrace:
    """Read one trace. Raises SourceError where nothing of it can be used."""
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
    rank = rank if rank is not None else rank_of_name(path)
    if rank is None:
        raise SourceError("tells no rank, neither inside (distributedInfo) nor by its name")
    on_device = "kernel" in collected.device or "nccl_kernel" in collected.device
    steps, begin, end = _windows(collected, on_device)
    if len(steps) == 0:
        raise SourceError("holds no operator, kernel or step")
    return RankTrace(
        rank=rank,
        path=path,
        world_size=_int(about.get("world_size")),
        stage=_stage(about, rank),
        device="cuda" if on_device else "cpu",
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
    if event.get("ph") != "X":
        return
    category, name = event.get("cat"), event.get("name")
    begin, duration = _time(event.get("ts")), _time(event.get("dur", 0))
    if not isinstance(category, str) or not isinstance(name, str) or begin is None or duration is None or duration < 0:
        into.damaged += 1
        return
    end = begin + duration
    if category in _DEVICE:
        communication = category == "kernel" and _COMMUNICATION_KERNEL.search(name[:200])
        into.add("nccl_kernel" if communication else "kernel" if category == "kernel" else "copy", begin, end)
    elif category == "cpu_op":
        if _COMMUNICATION_SPAN.match(name):
            into.add("backend", begin, end)
        elif not name.startswith(_ISSUES):
            into.add("operator", begin, end)
    elif category in ("user_annotation", "gpu_user_annotation"):
        _annotation(category, name[:200], begin, end, into)


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
    steps = collected.device_steps if on_device and collected.device_steps else collected.host_steps
    if not steps:
        kinds = ("kernel", "copy", "nccl_kernel") if on_device else ("operator", "backend")
        begin, end = collected.spans(*kinds)
        return np.zeros(min(len(begin), 1), dtype=np.int64), begin[:1], end[-1:]
    numbers = np.array(sorted(steps), dtype=np.int64)
    begin = np.array([steps[int(n)][0] for n in numbers])
    end = np.array([steps[int(n)][1] for n in numbers])
    if (
        steps is collected.device_steps
    ):  # a step's last kernel ends before the next one's first begins, or after: no gap
        end[:-1] = np.maximum(begin[1:], begin[:-1])
    return numbers, begin, end


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
