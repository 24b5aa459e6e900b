"""Work of device and host in a run recorded on a GPU, step by step and without waits (tests/support/replayed_gpu.py).

recording = Recording("stamped_none")
recording.work[1][40].device_ns          # of rank 1 in the loop's step 40, by place
recording.transfer_ns(40, call=2)
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.schema import TABLES
from probes.tape.rundir import RunDir
from tests.support.recorded_gpu import gpu_recording
from tests.support.recorded_stamps import RANKS, marks_of

BORDERS = ("begin", "forward", "between", "backward", "clip", "optimizer", "after")
PLACES = ("data", "forward", "between", "backward", "clip", "optimizer", "after")
"""The part of a step after each border."""
NEAR_NS = 300_000


class Point(NamedTuple):
    """A position in a step: `done_ns` of the work of part `place` precede it."""

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
        self.calls = [records(self._folder(rank), "nccl_calls") for rank in range(RANKS)]
        self.steps = sorted(set(self.marks[0]) & set(self.marks[1]))[:-1]
        self.calls_of_step = [self._calls_of_steps(rank) for rank in range(RANKS)]
        usual = len(self.calls_of_step[0][self.steps[-1]])  # the first ones of DDP have other buckets
        self.steps = [
            step for step in self.steps if len(self.calls_of_step[0][step]) == len(self.calls_of_step[1][step]) == usual
        ]
        stalls = [_stalls(self._folder(rank)) for rank in range(RANKS)]
        self.work: list[dict[int, Work]] = []
        for rank in range(RANKS):
            stamped = {step for step, intervals in stalls[rank].items() if self._is_busy(rank, step, intervals)}
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
        rows = [self.calls[rank][self.calls_of_step[rank][step][call]] for rank in range(RANKS)]
        took = [int(row["kernel_end_ns"] - row["kernel_start_ns"]) for row in rows]
        return max(min(took), 20_000)

    def borders(self, rank: int, step: int) -> list[tuple[int, int]]:
        """(host, device) of each border, and of the next step's first."""
        marks = self.marks[rank][step]
        return [marks[name] for name in BORDERS] + [self.marks[rank][step + 1]["begin"]]

    def _exact(self, rank: int, step: int, stalls: Sequence[tuple[int, int, bool]]) -> Work:
        borders = self.borders(rank, step)
        inside = [
            [(max(a, start), min(b, end), is_wait) for a, b, is_wait in stalls if a < end and b > start]
            for (_, start), (_, end) in pairwise(borders)
        ]
        work_ns = [
            max(0, end - start - sum(b - a for a, b, _ in inside[place]))
            for place, ((_, start), (_, end)) in enumerate(pairwise(borders))
        ]
        rows = [self.calls[rank][number] for number in self.calls_of_step[rank][step]]
        ends = [int(row["kernel_end_ns"]) for row in rows]

        def done(place: int, at: int) -> int:
            start = borders[place][1]
            stood = sum(max(0, min(b, at) - a) for a, b, _ in inside[place])
            return min(work_ns[place], max(0, at - start - stood))

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
            latest = done(place, started) if started < borders[place + 1][1] else work_ns[place]
            at = latest
            if started <= free + 100_000:
                at = min(latest, round(work_ns[place] * (issued - host) / max(1, host_end - host)))
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
        return Work([], work_ns, points)

    def _is_busy(self, rank: int, step: int, stalls: Sequence[tuple[int, int, bool]]) -> bool:
        """Return whether the device was kept busy: in profiled steps, and after a print, it waits for the host."""
        if step not in self.calls_of_step[rank] or not any(is_wait for *_, is_wait in stalls):
            return False
        borders = self.borders(rank, step)
        return 10 * sum(b - a for a, b, is_wait in stalls if not is_wait) < borders[-1][1] - borders[0][1]

    def _nearest(self, rank: int, step: int, exact: dict[int, Work]) -> Work:
        near = exact[min(exact, key=lambda one: abs(one - step))]
        hosts = [host for host, _ in self.borders(rank, step)]
        gaps = [b - a for a, b in pairwise(hosts)]
        return Work(
            [min(gap, limit) for gap, limit in zip(gaps, self.free_gaps, strict=True)],
            near.device_ns,
            near.points,
        )

    @cached_property
    def free_gaps(self) -> list[int]:
        """Host time of each part while the launch queue is not full, from the fastest host: a host whose queue was
        always full would be slower in each replay, and be blamed for it."""
        found = []
        for rank in range(RANKS):
            hosts = np.array([[host for host, _ in self.borders(rank, step)] for step in self.steps[5:]])
            found.append([round(quantiles(gaps, n=5)[0]) for gaps in np.diff(hosts, axis=1).T.tolist()])
        return [min(part_gaps) for part_gaps in zip(*found, strict=True)]


def records(folder: Path, table: str) -> npt.NDArray[Any]:
    """All rows, with epoch times."""
    rows = np.concatenate([read_segment(path).records for path in segment_paths(folder, table)])
    later_ns = shift_ns(folder)
    for column in TABLES[table].columns:
        if column.is_time:
            rows[column.name] += np.where(rows[column.name] > 0, later_ns, 0)
    return rows


def shift_ns(folder: Path) -> int:
    (first, *_) = (folder / "events.jsonl").read_text().splitlines()
    return int(json.loads(first)["clock_offset_ns"])


def _stalls(folder: Path) -> dict[int, list[tuple[int, int, bool]]]:
    """{step of the loop: (start, end, for communication)}."""
    names = {}
    for line in (folder / "names.jsonl").read_text().splitlines():
        row = json.loads(line)
        names[row["id"]] = row["name"]
    found: dict[int, list[tuple[int, int, bool]]] = {}
    for row in records(folder, "device_stalls"):
        wait = names[int(row["waits_for"])] == "communication"
        found.setdefault(int(row["step"]) - 1, []).append((int(row["start_ns"]), int(row["end_ns"]), wait))
    return found
