"""Read a trace of PyTorch's profiler (Kineto): one rank's `*.pt.trace.json[.gz]`, reduced to intervals by activity.

    trace = read_trace(Path("traces/worker0.pt.trace.json.gz"))
    trace.steps, trace.begin_us, trace.end_us      # ProfilerStep#: number, window
    trace.compute, trace.communication             # disjoint intervals, microseconds

* With device events, communication is NCCL's kernels, compute all other kernels, and copies are memory copies and
  memsets on the device. Step windows are taken from the device if the trace has them, since the host runs ahead.
* Without device events (CPU, gloo), compute is every operator except those that issue communication, and communication
  is the backend's spans (`gloo:all_reduce`), which run in separate threads.
* Events are read one at a time; only two numbers per relevant event are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store.arrays import Floats, Ints
from store.readers.traces.intervals import NONE, Spans
from store.readers.traces.step_windows import CollectedSpans, step_windows
from store.readers.traces.trace_devices import device_of, is_communication
from store.readers.untrusted.external_files import NO_RANK, SourceError, rank_of_name, unpacked
from store.readers.untrusted.json_stream import members

__all__ = ["MAX_STEPS", "RankTrace", "read_trace"]

_STEP = re.compile(r"ProfilerStep#(\d{1,9})$")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "hpu_op", "mtia_ccp_events", "privateuse1_kernel")
"""Categories of device activity, in lower case: CUDA and ROCm, traces of 2021, HPU, MTIA."""
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
_ASCEND = {"Computing": "kernel", "Communication": "nccl_kernel"}
"""Spans of the process `Overlap Analysis` in `trace_view.json` of Ascend's profiler."""
_COMMUNICATION_SPAN = re.compile(r"(gloo|ucc|mpi|xccl|nccl):")
_ISSUING_PREFIXES = ("c10d::", "record_param_comms", "gloo:", "nccl:", "_c10d_functional::", "c10d_functional::")
"""Operators that issue a collective; its duration is in the backend's span or kernel."""
_NUMBER = re.compile(r"\s?-?\d{1,19}(\.\d{1,12})?\s?")
_PIPELINE = re.compile(r"(^|_)(pp|pipeline)", re.IGNORECASE)
MAX_US = 1e17
MAX_STEPS = 100_000
MAX_UNKNOWN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's trace. Times are microseconds of the trace's clock, which other ranks do not share."""

    rank: int
    path: Path
    world_size: int | None
    stage: int
    """Pipeline stage if the trace names a pipeline group, otherwise 0. Only ranks of one stage do the same work."""
    device: str
    """Device type of these times: cpu, cuda, rocm, xpu, mtia, hpu, npu, privateuse1, or the category of an unknown
    device.
    """
    marked: bool
    """True if the trace has `ProfilerStep#` marks. If not, the whole trace is one step, with number 0."""
    steps: Ints
    begin_us: Floats
    end_us: Floats
    compute: Spans
    communication: Spans
    copies: Spans
    data: Spans
    num_events: int
    damaged_events: int
    problem: str = ""
    """The reason why the trace was not read to its end. What was read before is kept."""


def read_trace(path: Path, *, is_only: bool = False, each: Callable[[Any], None] | None = None) -> RankTrace:
    """Read one trace; `each` is called with every event. Raises SourceError if nothing in it is usable.

    `is_only`: there is no other trace, so the trace may lack a rank. It is then rank 0.
    """
    collected = CollectedSpans()
    info: Any = None
    model, problem = "", ""
    try:
        for key, value, is_item in members(unpacked(path), {"traceEvents"}):
            if is_item:
                if each is not None:
                    each(value)
                _event(value, collected)
            elif key == "distributedInfo":
                info = value
            elif key == "deviceProperties":
                model = _model(value)
    except SourceError as error:
        problem = str(error)
    if not collected.num_events:
        raise SourceError(problem or "holds no events")
    info = info if isinstance(info, dict) else {}
    rank = _int(info.get("rank"))
    if rank is None:
        named = "rank" in path.name.lower()
        rank = rank_of_name(path) if named or not is_only else 0
    if rank is None and is_only:
        rank = 0
    if rank is None:
        raise SourceError(f"{NO_RANK}, neither inside (distributedInfo) nor in its name")
    on_device = "kernel" in collected.by_kind or "nccl_kernel" in collected.by_kind
    device = device_of(collected.categories, model) if on_device else "cpu"
    if not collected.is_of_profiler():
        categories = ", ".join(sorted(collected.unknown)[:4])
        raise SourceError(f"is not a trace of a supported profiler: its event categories are {categories}")
    if not on_device and collected.unknown:  # a device of unknown type: its activities cannot be told apart
        device, count = max(collected.unknown.items(), key=lambda item: item[1])
        collected.by_kind["kernel"] = collected.by_kind.pop(f"?{device}")
        problem = problem or f"has {count:,} events of the unknown category {device!r}, counted as its compute"
        on_device = True
    steps, begin, end = step_windows(collected, on_device)
    if len(steps) == 0:
        raise SourceError("holds no operator, kernel or step")
    return RankTrace(
        rank=rank,
        path=path,
        world_size=_int(info.get("world_size")),
        stage=_stage(info, rank),
        device=device,
        marked=bool(collected.host_steps or collected.device_steps),
        steps=steps,
        begin_us=begin,
        end_us=end,
        compute=collected.spans("kernel" if on_device else "operator"),
        communication=collected.spans("nccl_kernel" if on_device else "backend"),
        copies=collected.spans("copy") if on_device else NONE,
        data=collected.spans("data"),
        num_events=collected.num_events,
        damaged_events=collected.damaged,
        problem=problem,
    )


def _event(event: Any, into: CollectedSpans) -> None:
    if not isinstance(event, dict):
        into.damaged += 1
        return
    into.num_events += 1
    if event.get("ph") == "M" and event.get("name") == "process_name":
        _name_process(event, into)
    if event.get("ph") != "X":
        return
    category, name = event.get("cat", ""), event.get("name")
    begin, duration = _time(event.get("ts")), _time(event.get("dur", 0))
    if not isinstance(category, str) or not isinstance(name, str) or begin is None or duration is None or duration < 0:
        into.damaged += 1
        return
    _span(event, category.lower(), name, begin, begin + duration, into)


def _span(event: Mapping[str, Any], category: str, name: str, begin: float, end: float, into: CollectedSpans) -> None:
    if into.processes.get(event.get("pid")) == "Overlap Analysis":
        if name in _ASCEND:
            into.categories.add("overlap analysis")
            into.add(_ASCEND[name], begin, end)
        return
    if category in _DEVICE:
        is_kernel = not category.endswith(("memcpy", "memset"))
        communication = is_kernel and is_communication(name)
        into.categories.add(category)
        into.add("nccl_kernel" if communication else "kernel" if is_kernel else "copy", begin, end)
        if (correlation := _correlation(event)) is not None:
            into.device_work[0].append(correlation)
            into.device_work[1].append(begin)
            into.device_work[2].append(end)
    elif category in _LAUNCHES:
        into.categories.add("hip_runtime" if name.startswith("hip") else category)
        if (correlation := _correlation(event)) is not None:
            into.launches[0].append(correlation)
            into.launches[1].append(begin)
    elif category in ("cpu_op", "operator"):
        if _COMMUNICATION_SPAN.match(name):
            into.add("backend", begin, end)
        elif not name.startswith(_ISSUING_PREFIXES) and not _STEP.match(name):
            into.add("operator", begin, end)
        elif _STEP.match(name):  # in traces of 2021, a step mark has the category of an operator
            _annotation("user_annotation", name[:200], begin, end, into)
    elif category in ("user_annotation", "gpu_user_annotation") or _STEP.match(name):
        _annotation(category if category == "gpu_user_annotation" else "user_annotation", name[:200], begin, end, into)
    elif category and category not in _HOST and len(into.unknown) < MAX_UNKNOWN:
        into.unknown[category] = into.unknown.get(category, 0) + 1
        into.add(f"?{category}", begin, end)


def _name_process(event: Mapping[str, Any], into: CollectedSpans) -> None:
    args, pid = event.get("args"), event.get("pid")
    if isinstance(args, dict) and isinstance(args.get("name"), str) and isinstance(pid, (int, str)):
        into.processes[pid] = args["name"][:100]


def _correlation(event: Mapping[str, Any]) -> int | None:
    args = event.get("args")
    found = args.get("correlation", args.get("correlation id")) if isinstance(args, dict) else None
    return found if isinstance(found, int) and 0 < found < 2**62 else None


def _annotation(category: str, name: str, begin: float, end: float, into: CollectedSpans) -> None:
    step = _STEP.match(name)
    if step:
        steps = into.host_steps if category == "user_annotation" else into.device_steps
        number = int(step[1])
        if number in steps:  # a device has one mark of the step per stream: unite them
            steps[number] = (min(begin, steps[number][0]), max(end, steps[number][1]))
        elif len(steps) < MAX_STEPS:
            steps[number] = (begin, end)
    elif category == "user_annotation" and _COMMUNICATION_SPAN.match(name):
        into.add("backend", begin, end)
    elif category == "user_annotation" and name.startswith("enumerate(DataLoader)"):
        into.add("data", begin, end)


def _stage(info: Mapping[str, Any], rank: int) -> int:
    groups = info.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and isinstance(group.get("pg_desc"), str) and _PIPELINE.search(group["pg_desc"]):
            ranks = group.get("ranks")
            if isinstance(ranks, list) and rank in ranks:
                return ranks.index(rank)
    return 0


def _model(properties: Any) -> str:
    """Name of the first device's model."""
    first = properties[0] if isinstance(properties, list) and properties else None
    name = first.get("name") if isinstance(first, dict) else None
    return name[:100] if isinstance(name, str) else ""


def _time(value: Any) -> float | None:
    if isinstance(value, str) and _NUMBER.fullmatch(value):  # Ascend's profiler writes times as text
        value = float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and -MAX_US < value < MAX_US:
        return float(value)
    return None  # not a number, too large, or NaN


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1_000_000 else None
