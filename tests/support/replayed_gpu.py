"""A run recorded on a GPU, played again with a fault: recorded work, the faulty rank's delays, waits that follow.

run = replayed_run("stamped_none", tmp_path, Delay(rank=1, ms=30, where="forward", on="device", since=41))

Work of device and host is that of the recording, from its marks, stalls and calls. What follows from it is computed:
a call starts when its stream and its rank are ready, and ends after its recorded transfer once all ranks have started;
a stream waits for a call where it did in the recording; a host runs ahead until two steps are in its launch queue, and
waits for the device where the loop reads its loss. All go through the real recorder; `is_stamped=False` leaves stamps
out, as recorders did before there were any.
"""

from __future__ import annotations

import json
import shutil
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probes.device.phase_events import ALWAYS_ABOVE_NS
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import EMPTY, HEADER_BYTES, OPEN
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from tests.support.recorded_gpu import gpu_recording
from tests.support.recorded_stamps import NEVER, RANKS, KnownEvent, RecordedClock, clocks, marks_of

BORDERS = ("begin", "forward", "between", "backward", "clip", "optimizer", "after")
PLACES = ("data", "forward", "between", "backward", "clip", "optimizer", "after")
"""What follows each border."""
LEAD_STEPS = 2
LAUNCH_NS = 8_000
NEAR_NS = 300_000
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
        """Delay there and then."""
        return round(self.ms * 1e6) if (where, on) == (self.where, self.on) and self.holds(rank, step) else 0

    def times(self, rank: int, step: int, on: str) -> float:
        """Factor of work there and then."""
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


class Point(NamedTuple):
    """A place in the work of a step: so much work of the place is done before it."""

    place: int
    done_ns: int
    what: str  # call, wait
    call: int  # in the step


@dataclass
class Work:
    """A rank's step as recorded, without waits."""

    host_ns: list[int]
    device_ns: list[int]
    points: list[Point] = field(default_factory=list)


class Recording:
    """Work of all ranks, and the transfer of each call."""

    def __init__(self, name: str) -> None:
        self.source = gpu_recording(name) / "run"
        self.marks = [marks_of(name, rank) for rank in range(RANKS)]
        self.calls = [_records(self._folder(rank), "nccl_calls") for rank in range(RANKS)]
        self.steps = sorted(set(self.marks[0]) & set(self.marks[1]))[:-1]
        self.of_step = [self._calls_of_steps(rank) for rank in range(RANKS)]
        usual = len(self.of_step[0][self.steps[-1]])  # the first ones of DDP have other buckets
        self.steps = [step for step in self.steps if len(self.of_step[0][step]) == len(self.of_step[1][step]) == usual]
        stalls = [_stalls(self._folder(rank)) for rank in range(RANKS)]
        self.work: list[dict[int, Work]] = []
        for rank in range(RANKS):
            stamped = {step for step, of in stalls[rank].items() if self._is_busy(rank, step, of)}
            exact = {step: self._exact(rank, step, stalls[rank][step]) for step in sorted(stamped & set(self.steps))}
            self.work.append({step: self._nearest(rank, step, exact) for step in self.steps})

    def _folder(self, rank: int) -> Path:
        return RunDir(self.source).rank_dir(0, rank)

    def _calls_of_steps(self, rank: int) -> dict[int, list[int]]:
        begins = [self.marks[rank][step]["begin"][0] for step in self.steps]
        end = self.marks[rank][self.steps[-1] + 1]["begin"][0]
        found: dict[int, list[int]] = {step: [] for step in self.steps}
        for number, at in enumerate(self.calls[rank]["enqueue_ns"]):
            if begins[0] <= at < end:
                found[self.steps[bisect_right(begins, at) - 1]].append(number)
        return found

    def transfer_ns(self, step: int, call: int) -> int:
        """Time of a call from its last rank's start to its end."""
        rows = [self.calls[rank][self.of_step[rank][step][call]] for rank in range(RANKS)]
        took = [int(row["kernel_end_ns"] - row["kernel_start_ns"]) for row in rows]
        return max(min(took), 20_000)

    def borders(self, rank: int, step: int) -> list[tuple[int, int]]:
        """(host, device) of each border, and of the next step's first."""
        own = self.marks[rank][step]
        return [own[name] for name in BORDERS] + [self.marks[rank][step + 1]["begin"]]

    def _exact(self, rank: int, step: int, stalls: Sequence[tuple[int, int, bool]]) -> Work:
        borders = self.borders(rank, step)
        inside = [
            [(max(a, start), min(b, end), is_wait) for a, b, is_wait in stalls if a < end and b > start]
            for (_, start), (_, end) in pairwise(borders)
        ]
        own = [
            max(0, end - start - sum(b - a for a, b, _ in inside[place]))
            for place, ((_, start), (_, end)) in enumerate(pairwise(borders))
        ]
        rows = [self.calls[rank][number] for number in self.of_step[rank][step]]
        ends = [int(row["kernel_end_ns"]) for row in rows]

        def done(place: int, at: int) -> int:
            start = borders[place][1]
            stood = sum(max(0, min(b, at) - a) for a, b, _ in inside[place])
            return min(own[place], max(0, at - start - stood))

        points = []
        for place, waits in enumerate(inside):
            for a, b, is_wait in waits:
                near = min(range(len(ends)), key=lambda call: abs(ends[call] - b), default=None)
                if is_wait and near is not None and abs(ends[near] - b) < NEAR_NS:
                    points.append(Point(place, done(place, a), "wait", near))
        free = 0
        for call, row in enumerate(rows):
            issued, started = int(row["enqueue_ns"]), int(row["kernel_start_ns"])
            place = max(0, min(6, bisect_right([host for host, _ in borders], issued) - 1))
            (host, _), (host_end, _) = borders[place], borders[place + 1]
            latest = done(place, started) if started < borders[place + 1][1] else own[place]
            at = latest
            if started <= free + 100_000:
                at = min(latest, round(own[place] * (issued - host) / max(1, host_end - host)))
            points.append(Point(place, at, "call", call))
            free = ends[call]
        limit = (len(PLACES), 0)
        made = {point.call: point for point in points if point.what == "call"}
        waits_of = {point.call: point for point in reversed(points) if point.what == "wait"}
        for call in reversed(range(len(rows))):  # made in their order, and before they are waited for
            limit = min([limit, made[call][:2]] + ([waits_of[call][:2]] if call in waits_of else []))
            made[call] = made[call]._replace(place=limit[0], done_ns=limit[1])
        points = [*made.values(), *(point for point in points if point.what == "wait")]
        points.sort(key=lambda point: (point.place, point.done_ns, point.call, point.what))
        return Work([], own, points)

    def _is_busy(self, rank: int, step: int, stalls: Sequence[tuple[int, int, bool]]) -> bool:
        """Return whether a step's device had enough to do: profiled steps, and those after a print, wait for hosts."""
        if step not in self.of_step[rank] or not any(is_wait for *_, is_wait in stalls):
            return False
        borders = self.borders(rank, step)
        return 10 * sum(b - a for a, b, is_wait in stalls if not is_wait) < borders[-1][1] - borders[0][1]

    def _nearest(self, rank: int, step: int, exact: dict[int, Work]) -> Work:
        near = exact[min(exact, key=lambda one: abs(one - step))]
        hosts = [host for host, _ in self.borders(rank, step)]
        gaps = [b - a for a, b in pairwise(hosts)]
        return Work(
            [min(gap, limit) for gap, limit in zip(gaps, self.free_gaps(rank), strict=True)],
            near.device_ns,
            near.points,
        )

    def free_gaps(self, rank: int) -> list[int]:
        """Host time of each place where its launch queue was not full."""
        hosts = np.array([[host for host, _ in self.borders(rank, step)] for step in self.steps[5:]])
        return [round(quantiles(gaps, n=5)[0]) for gaps in np.diff(hosts, axis=1).T.tolist()]


def _records(folder: Path, table: str) -> npt.NDArray[Any]:
    """All rows, dated by the epoch."""
    rows = np.concatenate([read_segment(path).records for path in segment_paths(folder, table)])
    shift_ns = _shift_ns(folder)
    for column in TABLES[table].columns:
        if column.is_time:
            rows[column.name] += np.where(rows[column.name] > 0, shift_ns, 0)
    return rows


def _shift_ns(folder: Path) -> int:
    (first, *_) = (folder / "events.jsonl").read_text().splitlines()
    return int(json.loads(first)["clock_offset_ns"])


def _stalls(folder: Path) -> dict[int, list[tuple[int, int, bool]]]:
    """{step of the loop: (start, end, for communication)}."""
    names = {}
    for line in (folder / "names.jsonl").read_text().splitlines():
        row = json.loads(line)
        names[row["id"]] = row["name"]
    found: dict[int, list[tuple[int, int, bool]]] = {}
    for row in _records(folder, "device_stalls"):
        wait = names[int(row["waits_for"])] == "communication"
        found.setdefault(int(row["step"]) - 1, []).append((int(row["start_ns"]), int(row["end_ns"]), wait))
    return found


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
                number = self.recording.of_step[rank][step][call]
                issued = self.played[rank].calls[number][0]
                self.played[rank].calls[number] = (issued, start, end)
        return self.ends[key]

    def _last_before(self, step: int) -> tuple[int, int] | None:
        if step == self.recording.steps[0]:
            return None
        return step - 1, len(self.recording.of_step[0][step - 1]) - 1

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
                late = sum(fault.ns(rank, step + 1, PLACES[place], "host") for fault in self.faults)
                took = work.host_ns[place]
                ready = host + late  # when the host goes on in this place
                if any(stop[:3] == (rank, step + 1, "host") and stop.where == PLACES[place] for stop in self.stops):
                    ready = NEVER
                scale = 1.0
                for fault in self.faults:
                    scale *= fault.times(rank, step + 1, "device")
                own = round(work.device_ns[place] * scale)
                extra = sum(fault.ns(rank, step + 1, PLACES[place], "device") for fault in self.faults)
                done, is_spent = 0, extra == 0
                points = [point for point in work.points if point.place == place]
                for point in points:
                    at = round(point.done_ns * scale)
                    share = at / own if own else 0.0
                    enqueued = ready + round(took * share)
                    if not is_spent and 2 * at >= own:
                        device, is_spent = device + extra, True
                    device = max(device + at - done, enqueued + LAUNCH_NS if point.what == "wait" else 0)
                    done = at
                    if point.what == "call":
                        if (rank, step + 1, "device", point.call) in [stop[:4] for stop in self.stops]:
                            device = NEVER
                        number = rec.of_step[rank][step][point.call]
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
                device += own - done + (0 if is_spent else extra)
                host = ready + took
            last = len(rec.of_step[rank][step]) - 1
            end = self._end(step, last) if last >= 0 else 0
            while end is None:
                yield 1
                end = self._end(step, last)
            if step % 10 == 9 and rank == 0:
                host = max(host, device)  # it prints its loss
            yield 1
        stamps = self.played[rank].stamps[rec.steps[-1] + 1] = [("begin", host, max(device, host + LAUNCH_NS))]


# ---- through the recorder ----

_OPENS = {"forward": "forward", "backward": "backward", "optimizer": "optimizer"}
_CLOSES = {"between": "forward", "clip": "backward", "after": "optimizer"}


_recording = cache(Recording)


def replayed_run(name: str, into: Path, *faults: Delay | Stop, is_stamped: bool = True) -> RunDir:
    """Write the run. One that stops has no end yet (tests/support/ended_gpu.py)."""
    recording = _recording(name)
    played = _Job(recording, faults).run()
    run = RunDir(into / f"{name}_replayed")
    shutil.copytree(recording.source, run.path, ignore=shutil.ignore_patterns("rank-*", "cache", "logs", "health.*"))
    for rank in range(RANKS):
        source, target = RunDir(recording.source).rank_dir(0, rank), run.rank_dir(0, rank)
        clock = RecordedClock(source)
        with clocks(clock, stamped_from_ns=ALWAYS_ABOVE_NS):
            last = [one.span for one in faults if isinstance(one, Stop) and one.span and one.rank == rank]
            _record(recording, played[rank], source, target, clock, rank, is_stamped, last)
    return run


def _record(
    rec: Recording,
    played: Played,
    source: Path,
    target: Path,
    clock: RecordedClock,
    rank: int,
    is_stamped: bool,
    last_spans: Sequence[str],
) -> None:
    clock.wall_ns = played.stamps[rec.steps[0]][0][1] - 1_000_000
    recorder = TapeRecorder(target, rank=rank, attempt=0, world_size=RANKS, local_rank=rank, device=f"cuda:{rank}")
    for line in (source / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.pop("kind") == "process_group":
            known = {key: event[key] for key in event if key not in ("wall_ns", "mono_ns", "attempt", "rank", "step")}
            recorder.event("process_group", **known)
    for path in source.glob("nccl_*"):
        shutil.copy(path, target / path.name)
    _move_calls(target, played.calls, _shift_ns(source))
    times: deque[int] = deque()
    rows = {int(row["step"]): row for row in _records(source, "steps")}
    of_step: list[npt.NDArray[Any]] = []
    recorder._clock._core_time = SimpleNamespace(  # type: ignore[assignment]
        begin=lambda: None,
        end=lambda: tuple(int(of_step[-1][name]) for name in ("cpu_ns", "run_delay_ns", "major_faults")),
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
            clock.wall_ns = max(clock.wall_ns, host)
            times.clear()
            times.append(device)
            if what in _CLOSES:
                spans.pop().__exit__(None, None, None)
            elif what in _OPENS:
                spans.append(recorder.span(_OPENS[what]))
                spans[-1].__enter__()
            elif what == "begin":
                if step != rec.steps[0]:
                    row = of_step[-1]
                    recorder.log(
                        **{name: row[name].item() for name in ("tokens", "memory_bytes", "loss") if row[name] > 0}
                    )
                    recorder.end_step()
                    times.append(device)
                if step in rec.work[rank]:
                    recorder.begin_step(step + 1)
                    of_step.append(rows[step + 1])
            elif recorder.stamps is not None:
                getattr(recorder.stamps, what)()
    recorder.close()


def _move_calls(folder: Path, calls: dict[int, tuple[int, int, int]], shift_ns: int) -> None:
    """Date the recorded calls anew."""
    number, is_stopped = 0, any(ended >= NEVER for *_, ended in calls.values())
    for path in segment_paths(folder, "nccl_calls"):
        segment = read_segment(path)
        header = segment.header
        rows = np.memmap(path, header.dtype, "r+", HEADER_BYTES, (header.capacity,))
        for place in segment.indices:
            if number in calls:
                issued, started, ended = (at - shift_ns for at in calls[number])
                row = rows[place]
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
            elif is_stopped and number > max(calls):
                rows[place]["state"] = EMPTY
            number += 1
        rows.flush()
