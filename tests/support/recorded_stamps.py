"""Stamps that the probe would have written in a run recorded on a GPU, from its marks and its profiler's trace.

run = stamped_run("none", tmp_path)              # a run folder: steps 51 to 56, their stamps and the plugin's calls
exposed = traced_exposed_ns("none", rank=0)      # {51: ...}: the trace's answer for the same steps

The loop recorded an event at each border of a phase (`marks_rank*.json`); waits of the compute stream are taken from
Kineto's trace: a wait that the host enqueued between two kernels begins when the first is over, and ends with the last
call that ended before the second began; DDP's last one lasts to the end of the backward pass. All go through the real
recorder, as events whose times are known. Numbers of steps are the recorder's, from 1; the loop counts from 0.
"""

from __future__ import annotations

import gzip
import json
import shutil
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from probes import step_clock, tape_recorder
from probes.device import memory, phase_events
from probes.tape import events
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from tests.support.recorded_gpu import gpu_recording

RANKS = 2
NEVER = 1 << 62
"""Time of what never happens."""
_SPANS = (("forward", "forward", "between"), ("backward", "backward", "clip"), ("optimizer", "optimizer", "after"))


class Interval(NamedTuple):
    """Epoch nanoseconds."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Trace:
    """A rank's kernels and copies by the device's time, and what its host enqueued, by the host's."""

    compute: list[Interval]
    launched_ns: list[int]  # when the host launched each of `compute`, in the same order
    communication: list[Interval]
    calls_ns: list[int]  # when the host launched each of `communication`
    waits_ns: list[int]


class Stamp(NamedTuple):
    """An event of the loop: when the host reaches it, and when the device does."""

    what: str
    host_ns: int
    device_ns: int


@cache
def marks_of(name: str, rank: int) -> dict[int, dict[str, tuple[int, int]]]:
    """{step of the loop: {border: (host, device)}}, epoch nanoseconds of the host's clock."""
    rows = json.loads((gpu_recording(name) / f"marks_rank{rank}.json").read_text())
    offset = max(host - round(ms * 1e6) for _, _, host, ms in rows)
    found: dict[int, dict[str, tuple[int, int]]] = {}
    for step, border, host, ms in rows:
        found.setdefault(step, {})[border] = (host, offset + round(ms * 1e6))
    return found


@cache
def trace_of(name: str, rank: int) -> Trace:
    """Read Kineto's trace."""
    with gzip.open(gpu_recording(name) / f"trace_rank{rank}.json.gz") as file:
        whole = json.load(file)
    base = whole["baseTimeNanoseconds"]
    launched: dict[int, int] = {}
    waits: list[int] = []
    device: list[dict[str, Any]] = []
    for event in whole["traceEvents"]:
        kind = event.get("cat")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            device.append(event)
        elif kind in ("cuda_runtime", "cuda_driver"):
            launched[event["args"]["correlation"]] = base + round(event["ts"] * 1e3)
            if event["name"] == "cudaStreamWaitEvent":
                waits.append(base + round(event["ts"] * 1e3))
    nccl = [event for event in device if "nccl" in event["name"]]
    stream = min(event["args"]["stream"] for event in device)  # torch's default stream: the first that was made
    kernels = sorted(
        (e for e in device if e["args"]["stream"] == stream), key=lambda e: launched[e["args"]["correlation"]]
    )
    return Trace(
        compute=[_interval(base, event) for event in kernels],
        launched_ns=[launched[event["args"]["correlation"]] for event in kernels],
        communication=sorted(_interval(base, event) for event in nccl),
        calls_ns=sorted(launched[event["args"]["correlation"]] for event in nccl),
        waits_ns=sorted(waits),
    )


def _interval(base: int, event: dict[str, Any]) -> Interval:
    start = base + round(event["ts"] * 1e3)
    return Interval(start, start + round(event["dur"] * 1e3))


def waits_between(trace: Trace, first_ns: int, last_ns: int) -> list[tuple[int, Interval]]:
    """(when the host enqueued it, when the stream waited) of the waits between two times of the host."""
    ends = sorted(call.end_ns for call in trace.communication)
    found = []
    for host_ns in trace.waits_ns:
        following = bisect_left(trace.launched_ns, host_ns)  # the kernel launched after the wait
        if not first_ns <= host_ns < last_ns or not 0 < following < len(trace.compute):
            continue
        start_ns = max(trace.compute[following - 1].end_ns, host_ns)
        ended = bisect_left(ends, trace.compute[following].start_ns) - 1
        end_ns = max(start_ns, ends[ended]) if ended >= 0 else start_ns
        found.append((host_ns, Interval(start_ns, end_ns)))
    return found


def steps_of(name: str, rank: int) -> list[int]:
    """Steps of the loop that are completely in the trace."""
    trace, marks = trace_of(name, rank), marks_of(name, rank)
    first, last = trace.compute[0].start_ns, trace.compute[-1].end_ns
    return [
        step
        for step in sorted(marks)
        if step + 1 in marks and marks[step]["forward"][1] >= first - 1_000_000 and marks[step + 1]["begin"][1] <= last
    ]


def stamps_of(name: str, rank: int, step: int) -> list[Stamp]:
    """The stamps of a step in the order in which the host makes them."""
    marks, trace = marks_of(name, rank), trace_of(name, rank)
    borders, end = marks[step], marks[step + 1]["begin"]
    stamps = [Stamp("begin", *borders["begin"])]
    for kind, enter, leave in _SPANS:
        stamps += [Stamp(f"enter {kind}", *borders[enter]), Stamp(f"leave {kind}", *borders[leave])]
    stamps.append(Stamp("end", *end))
    waits = waits_between(trace, borders["begin"][0], end[0])
    if name.startswith("fsdp2"):
        for host_ns, wait in waits:
            stamps += [Stamp("enter_wait", host_ns, wait.start_ns), Stamp("leave_wait", host_ns, wait.end_ns)]
    else:  # DDP waits in C++ after its last call, until the end of the backward pass
        last_call_ns = max(at for at in trace.calls_ns if at < borders["clip"][0])
        host_ns = min(at for at in trace.waits_ns if at > last_call_ns)
        before = trace.compute[bisect_left(trace.launched_ns, host_ns) - 1]
        stamps.append(Stamp("enter_wait", host_ns, max(before.end_ns, host_ns)))
    ordered = sorted(stamps, key=lambda stamp: stamp.host_ns)
    at, found = 0, []
    for stamp in ordered:  # a stream executes in order
        at = max(at, stamp.device_ns)
        found.append(stamp._replace(device_ns=at))
    return found


@cache
def traced_exposed_ns(name: str, rank: int) -> dict[int, int]:
    """{step number: time in which NCCL ran and the compute stream was idle}, ns."""
    trace, marks = trace_of(name, rank), marks_of(name, rank)
    found = {}
    for step in steps_of(name, rank):
        window = Interval(marks[step]["begin"][1], marks[step + 1]["begin"][1])
        calls = _merged(_clipped(trace.communication, window))
        busy = _merged(_clipped(trace.compute, window))
        found[step + 1] = sum(b - a for a, b in calls) - sum(
            max(0, min(b, d) - max(a, c)) for a, b in calls for c, d in busy
        )
    return found


def _clipped(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    cut = (Interval(max(a, window.start_ns), min(b, window.end_ns)) for a, b in intervals)
    return [one for one in cut if one.end_ns > one.start_ns]


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1].end_ns:
            found[-1] = Interval(found[-1].start_ns, max(found[-1].end_ns, end))
        else:
            found.append(Interval(start, end))
    return found


# ---- through the recorder ----


class RecordedClock:
    """The host's clock of the recording, set by the replay."""

    def __init__(self, source: Path) -> None:
        (first, *_) = (source / "events.jsonl").read_text().splitlines()
        self._shift_ns = json.loads(first)[
            "clock_offset_ns"
        ]  # unchanged: the plugin's tapes are copied with their times
        self.wall_ns = 0

    def mono_ns(self) -> int:
        return self.wall_ns - self._shift_ns


class KnownEvent:
    """An event whose time on the device is known when it is recorded."""

    def __init__(self, times: deque[int]) -> None:
        self._times = times
        self.at_ns = 0

    def record(self) -> None:
        self.at_ns = self._times.popleft()

    def query(self) -> bool:
        return self.at_ns < NEVER

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: KnownEvent) -> float:
        return (other.at_ns - self.at_ns) / 1e6


@contextmanager
def clocks(clock: RecordedClock, *, stamped_from_ns: int = 0) -> Iterator[None]:
    """Let the recorder read this clock, and stamp every step longer than `stamped_from_ns`."""
    event_time = SimpleNamespace(time_ns=lambda: clock.wall_ns, monotonic_ns=clock.mono_ns)
    with (
        mock.patch.object(events, "time", event_time),
        mock.patch.object(memory, "_reader", return_value=dict),
        mock.patch.object(tape_recorder, "device_uuid", return_value=""),
        mock.patch.object(tape_recorder, "time", event_time),
        mock.patch.object(tape_recorder, "_monotonic_ns", clock.mono_ns),
        mock.patch.object(step_clock, "_monotonic_ns", clock.mono_ns),
        mock.patch.object(phase_events, "_monotonic_ns", clock.mono_ns),
        mock.patch.object(
            phase_events, "ALWAYS_ABOVE_NS", stamped_from_ns
        ),  # otherwise every N-th of these short steps
    ):
        yield


def stamped_run(name: str, into: Path) -> RunDir:
    """Write a run of the traced steps."""
    source = RunDir(gpu_recording(name) / "run")
    run = RunDir(into / name)
    run.path.mkdir(parents=True)
    for file in ("run.json", "attempts"):
        path = source.path / file
        (shutil.copytree if path.is_dir() else shutil.copy)(path, run.path / file)
    for rank in range(RANKS):
        clock = RecordedClock(source.rank_dir(0, rank))
        with clocks(clock):
            _record(source.rank_dir(0, rank), run.rank_dir(0, rank), clock, name, rank)
    return run


def _record(source: Path, target: Path, clock: RecordedClock, name: str, rank: int) -> None:
    steps = steps_of(name, rank)
    clock.wall_ns = marks_of(name, rank)[steps[0]]["begin"][0] - 1_000_000
    recorder = TapeRecorder(target, rank=rank, attempt=0, world_size=RANKS, local_rank=rank, device=f"cuda:{rank}")
    for line in (source / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.pop("kind") == "process_group":
            known = {key: event[key] for key in event if key not in ("wall_ns", "mono_ns", "attempt", "rank", "step")}
            recorder.event("process_group", **known)
    for path in source.glob("nccl_*"):
        shutil.copy(path, target / path.name)
    times: deque[int] = deque()
    assert recorder.stamps is not None
    recorder.stamps._new_event = lambda: KnownEvent(times)
    for step in steps:
        spans: list[Any] = []
        for stamp in stamps_of(name, rank, step):
            clock.wall_ns = max(clock.wall_ns, stamp.host_ns)
            times.append(stamp.device_ns)
            what, _, kind = stamp.what.partition(" ")
            if what == "begin":
                recorder.begin_step(step + 1)
            elif what == "end":
                recorder.end_step()
            elif what == "enter":
                spans.append(recorder.span(kind))
                spans[-1].__enter__()
            elif what == "leave":
                spans.pop().__exit__(None, None, None)
            else:
                getattr(recorder.stamps, what)()
        assert not times
    recorder.close()
