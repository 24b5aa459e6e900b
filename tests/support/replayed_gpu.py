"""A run recorded on a GPU, played again with a fault: recorded work, the faulty rank's delays, waits that follow.

run = replayed_run("stamped_none", tmp_path, Delay(rank=1, ms=30, where="forward", on="device", since=41))

Work of device and host is that of the recording, from its marks, stalls and calls. What follows from it is computed:
a call starts when its stream and its rank are ready, and ends after its recorded transfer once all ranks have started;
a stream waits for a call where it did in the recording; a host runs ahead until two steps are in its launch queue, and
waits for the device where the loop reads its loss. All go through the real recorder; `is_stamped=False` leaves stamps
out, as in older recorders.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probes.device.phase_events import ALWAYS_ABOVE_NS
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.writer import EMPTY, HEADER_BYTES, OPEN
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from tests.support.recorded_stamps import NEVER, RANKS, KnownEvent, RecordedClock, clocks
from tests.support.recorded_work import BORDERS, PLACES, Recording, records, shift_ns

LEAD_STEPS = 2
LAUNCH_NS = 8_000
NULL = -(1 << 63)


class Delay(NamedTuple):
    """A fault: so many milliseconds more in each step of `rank` (None: of all) from `since` to `until`.

    Steps are counted from 1. `on`: device, host, or transfer: then a call's transfer takes `factor` times as long.
    """

    rank: int | None = 1
    ms: float = 30.0
    where: str = "forward"
    on: str = "device"
    since: int = 41
    until: int = 1 << 30
    every: int = 1
    factor: float = 1.0

    def ns(self, rank: int, step: int, where: str, on: str) -> int:
        """Delay of this work, ns."""
        return round(self.ms * 1e6) if (where, on) == (self.where, self.on) and self.holds(rank, step) else 0

    def times(self, rank: int, step: int, on: str) -> float:
        """Factor of the duration of this work."""
        return self.factor if on == self.on and self.holds(rank, step) else 1.0

    def holds(self, rank: int, step: int) -> bool:
        """Return whether the rank has the fault in that step."""
        return self.rank in (None, rank) and self.since <= step <= self.until and (step - self.since) % self.every == 0


class Stop(NamedTuple):
    """A fault: a rank's host or device stops for good, in a step counted from 1.

    `on`: device (the call of that number in the step is not started), call (it is started and does not end), or host
    (it stops at the begin of `where`, within a span of kind `span` if one is given).
    """

    rank: int = 1
    step: int = 26
    on: str = "device"
    call: int = 0
    where: str = "forward"
    span: str = ""


class Restart(NamedTuple):
    """The attempt that a replay writes: its number, its first step, and how much later it runs."""

    attempt: int = 0
    first_step: int = 1
    later_ns: int = 0


FIRST = Restart()


# ---- playing ----


@dataclass
class Played:
    """A rank's times in the replayed run."""

    stamps: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)  # (what, host, device)
    calls: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # row: issued, started, ended


class _Job:
    def __init__(self, recording: Recording, faults: Sequence[Delay | Stop]) -> None:
        self.recording = recording
        self.faults = [fault for fault in faults if isinstance(fault, Delay)]
        self.stops = [fault for fault in faults if isinstance(fault, Stop)]
        self.played = [Played() for _ in range(RANKS)]
        self.started: list[dict[tuple[int, int], int]] = [{} for _ in range(RANKS)]
        self.stream_ns = [0] * RANKS
        self.ends: dict[tuple[int, int], int] = {}

    def run(self) -> list[Played]:
        ranks = {rank: self._rank(rank) for rank in range(RANKS)}
        while ranks:
            for rank, program in list(ranks.items()):
                if next(program, None) is None:
                    del ranks[rank]
        return self.played

    def _end(self, step: int, call: int) -> int | None:
        """End of a call; None until all ranks have come to it."""
        key = (step, call)
        if key not in self.ends:
            before = (step, call - 1) if call else self._last_before(step)
            if any(key not in started for started in self.started):
                return None
            free = 0
            if before is not None:
                found = self._end(*before)
                assert found is not None
                free = found
            starts = [max(started[key], free) for started in self.started]
            took = self.recording.transfer_ns(step, call)
            for fault in self.faults:
                took = round(took * fault.times(0 if fault.rank is None else fault.rank, step + 1, "transfer"))
            if any((stop.on, stop.step, stop.call) == ("call", step + 1, call) for stop in self.stops):
                took = NEVER
            end = self.ends[key] = min(NEVER, max(starts) + took)
            for rank, start in enumerate(starts):
                number = self.recording.calls_of_step[rank][step][call]
                issued = self.played[rank].calls[number][0]
                self.played[rank].calls[number] = (issued, start, end)
        return self.ends[key]

    def _last_before(self, step: int) -> tuple[int, int] | None:
        if step == self.recording.steps[0]:
            return None
        return step - 1, len(self.recording.calls_of_step[0][step - 1]) - 1

    def _rank(self, rank: int) -> Iterator[int]:
        rec = self.recording
        host, device = rec.marks[rank][rec.steps[0]]["begin"]
        begun: dict[tuple[int, int], int] = {}
        for step in rec.steps:
            work = rec.work[rank][step]
            stamps = self.played[rank].stamps[step] = []
            for place, name in enumerate(BORDERS):
                host = max(host, begun.get((step - LEAD_STEPS, place), 0))
                device = max(device, host + LAUNCH_NS)
                begun[step, place] = device
                stamps.append((name, host, device))
                delay = sum(fault.ns(rank, step + 1, PLACES[place], "host") for fault in self.faults)
                took = work.host_ns[place]
                ready = host + delay  # when the host starts this part
                if any(stop[:3] == (rank, step + 1, "host") and stop.where == PLACES[place] for stop in self.stops):
                    ready = NEVER
                scale = 1.0
                for fault in self.faults:
                    scale *= fault.times(rank, step + 1, "device")
                work_ns = round(work.device_ns[place] * scale)
                extra = sum(fault.ns(rank, step + 1, PLACES[place], "device") for fault in self.faults)
                done, is_spent = 0, extra == 0
                points = [point for point in work.points if point.place == place]
                for point in points:
                    at = round(point.done_ns * scale)
                    share = at / work_ns if work_ns else 0.0
                    enqueued = ready + round(took * share)
                    if not is_spent and 2 * at >= work_ns:
                        device, is_spent = device + extra, True
                    device = max(device + at - done, enqueued + LAUNCH_NS if point.what == "wait" else 0)
                    done = at
                    if point.what == "call":
                        if (rank, step + 1, "device", point.call) in [stop[:4] for stop in self.stops]:
                            device = NEVER
                        number = rec.calls_of_step[rank][step][point.call]
                        self.played[rank].calls[number] = (enqueued, 0, 0)
                        self.started[rank][step, point.call] = max(device, enqueued + LAUNCH_NS)
                    else:
                        end = self._end(step, point.call)
                        while end is None:
                            yield 1
                            end = self._end(step, point.call)
                        stamps.append(("enter_wait", enqueued, device))
                        device = max(device, end)
                        stamps.append(("leave_wait", enqueued, device))
                device += work_ns - done + (0 if is_spent else extra)
                host = ready + took
            last = len(rec.calls_of_step[rank][step]) - 1
            end = self._end(step, last) if last >= 0 else 0
            while end is None:
                yield 1
                end = self._end(step, last)
            if step % 10 == 9 and rank == 0:
                host = max(host, device)  # it reads its loss to print it
            yield 1
        stamps = self.played[rank].stamps[rec.steps[-1] + 1] = [("begin", host, max(device, host + LAUNCH_NS))]


# ---- through the recorder ----

_OPENS = {"forward": "forward", "backward": "backward", "optimizer": "optimizer"}
_CLOSES = {"between": "forward", "clip": "backward", "after": "optimizer"}


_recording = cache(Recording)


def replayed_run(name: str, into: Path, *faults: Delay | Stop, is_stamped: bool = True) -> RunDir:
    """Write the run. One that stops has no end yet (tests/support/ended_gpu.py)."""
    run = RunDir(into / f"{name}_replayed")
    source = _recording(name).source
    shutil.copytree(
        source, run.path, ignore=shutil.ignore_patterns("rank-*", "cache", "logs", "health.*", "segments.*")
    )
    add_attempt(run, name, faults, is_stamped=is_stamped)
    return run


def add_attempt(
    run: RunDir, name: str, faults: Sequence[Delay | Stop], restart: Restart = FIRST, *, is_stamped: bool = True
) -> None:
    """Write the tapes of its ranks. Faults count steps of the recording."""
    recording = _recording(name)
    played = _Job(recording, faults).run()
    for rank in range(RANKS):
        source, target = RunDir(recording.source).rank_dir(0, rank), run.rank_dir(restart.attempt, rank)
        clock = RecordedClock(source)
        with clocks(clock, stamped_from_ns=ALWAYS_ABOVE_NS):
            last = [one.span for one in faults if isinstance(one, Stop) and one.span and one.rank == rank]
            _record(recording, played[rank], source, target, clock, rank, is_stamped, last, restart)


def _record(
    rec: Recording,
    played: Played,
    source: Path,
    target: Path,
    clock: RecordedClock,
    rank: int,
    is_stamped: bool,
    last_spans: Sequence[str],
    restart: Restart,
) -> None:
    attempt, first_step, later_ns = restart
    clock.wall_ns = played.stamps[rec.steps[0]][0][1] - 1_000_000 + later_ns
    identity = {"rank": rank, "local_rank": rank, "device": f"cuda:{rank}"}
    recorder = TapeRecorder(target, attempt=attempt, world_size=RANKS, **identity)  # type: ignore[arg-type]
    for line in (source / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.pop("kind") == "process_group":
            known = {key: event[key] for key in event if key not in ("wall_ns", "mono_ns", "attempt", "rank", "step")}
            recorder.event("process_group", **known)
    for path in source.glob("nccl_*"):
        shutil.copy(path, target / path.name)
    _move_calls(target, played.calls, shift_ns(source) - later_ns)
    if attempt:
        _set_attempt(target, restart)
    times: deque[int] = deque()
    rows = {int(row["step"]): row for row in records(source, "steps")}
    recorded_steps: list[npt.NDArray[Any]] = []
    recorder._clock._core_time = SimpleNamespace(  # type: ignore[assignment]
        begin=lambda: None,
        end=lambda: tuple(int(recorded_steps[-1][name]) for name in ("cpu_ns", "run_delay_ns", "major_faults")),
        close=lambda: None,
    )
    if not is_stamped:
        recorder._clock.events = None
    if recorder.stamps is not None:
        recorder.stamps._new_event = lambda: KnownEvent(times)
    spans: list[Any] = []
    for step in [*rec.steps, rec.steps[-1] + 1]:
        for what, host, device in sorted(played.stamps[step], key=lambda stamp: stamp[1]):
            if host >= NEVER:
                for kind in last_spans:
                    recorder.span(kind).__enter__()
                return
            clock.wall_ns = max(clock.wall_ns, host + later_ns)
            times.clear()
            times.append(min(NEVER, device + later_ns))
            if what in _CLOSES:
                spans.pop().__exit__(None, None, None)
            elif what in _OPENS:
                spans.append(recorder.span(_OPENS[what]))
                spans[-1].__enter__()
            elif what == "begin":
                if step != rec.steps[0]:
                    row = recorded_steps[-1]
                    recorder.log(
                        **{name: row[name].item() for name in ("tokens", "memory_bytes", "loss") if row[name] > 0}
                    )
                    recorder.end_step()
                    times.append(min(NEVER, device + later_ns))
                if step in rec.work[rank]:
                    recorder.begin_step(step + first_step)
                    recorded_steps.append(rows[step + 1])
            elif recorder.stamps is not None:
                getattr(recorder.stamps, what)()
    recorder.close()


def _set_attempt(folder: Path, restart: Restart) -> None:
    """Change the copied tapes to those of a later attempt."""
    for path in folder.glob("nccl_*.tape"):
        segment = read_segment(path)
        header = segment.header
        text = path.read_bytes()[:HEADER_BYTES]
        with path.open("r+b") as file:
            file.write(text.replace(b'"attempt":0,', b'"attempt":%d,' % restart.attempt))
        if header.table.name == "nccl_calls":  # moved already
            continue
        rows = np.memmap(path, header.dtype, "r+", HEADER_BYTES, (header.capacity,))
        for column in header.table.columns:
            if column.is_time:
                rows[column.name] += np.where(rows[column.name] > 0, restart.later_ns, 0)
        rows.flush()


def _move_calls(folder: Path, calls: dict[int, tuple[int, int, int]], shift_ns: int) -> None:
    """Set the times of the recorded calls to the replayed ones."""
    number, last = 0, max(calls)
    for path in segment_paths(folder, "nccl_calls"):
        segment = read_segment(path)
        header = segment.header
        rows = np.memmap(path, header.dtype, "r+", HEADER_BYTES, (header.capacity,))
        for index in segment.indices:
            if number in calls:
                issued, started, ended = (at - shift_ns for at in calls[number])
                row = rows[index]
                moved, took = started - int(row["kernel_start_ns"]), ended - started
                if issued + shift_ns >= NEVER:
                    row["state"] = EMPTY
                    number += 1
                    continue
                row["enqueue_ns"], row["launched_ns"] = issued, issued + 5_000
                row["kernel_start_ns"], row["kernel_end_ns"] = started, ended
                row["gpu_start_ns"] += moved
                row["gpu_end_ns"] = row["gpu_start_ns"] + took
                row["slowest_channel_ns"] = took
                if started + shift_ns >= NEVER:
                    row["kernel_start_ns"] = row["gpu_start_ns"] = NULL
                    row["channels_started"] = 0
                if ended + shift_ns >= NEVER:
                    row["state"] = OPEN
                    row["kernel_end_ns"] = row["gpu_end_ns"] = row["slowest_channel_ns"] = NULL
                    row["channels_stopped"] = 0
            elif number > last:  # calls of steps that are not replayed, which would now fall into other steps
                rows[index]["state"] = EMPTY
            number += 1
        rows.flush()
