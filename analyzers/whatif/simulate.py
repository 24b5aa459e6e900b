"""Simulate steps: compute their total time from each rank's own work and its waits for others.

    graph = Graph()
    call = graph.new_call(("dp", "all_reduce", 4096), transfer_ms=2.0)
    for rank, ms in enumerate((10.0, 14.0)):
        graph.add_work(rank, step=1, place=0, ms=ms)
        graph.add_post(rank, call)
        graph.add_wait(rank, call)
        graph.end_step(rank, 1)
    replay(graph)                              # 16.0: rank 0 waits for rank 1
    replay(graph, work_ms=[10.0, 10.0])        # 12.0: without the excess of rank 1

A call is complete when its last member has posted it and the transfer is over. A rank posts a call and continues; at a
wait it continues when the call is complete. Ranks depend on each other in no other way, whatever the parallelism: the
order of a pipeline's microbatches follows from its sends and receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from analyzers.source import Floats, Ints

__all__ = ["Graph", "Key", "replay", "step_ends"]

Key = tuple[object, ...]
_WORK, _POST, _WAIT, _MARK = range(4)


@dataclass(slots=True)
class Graph:
    """The program of each rank: work, posts, waits and ends of steps, in order. Times in milliseconds."""

    programs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Program of each rank, as (operation, number of its piece of work or call)."""
    work_ms: list[float] = field(default_factory=list)
    """Durations of pieces of work, by number."""
    delay_ms: list[float] = field(default_factory=list)
    """Part of each piece in which no recorded work ran: launch delay."""
    work_at: list[tuple[int, int, int]] = field(default_factory=list)
    """For each piece of work: rank, step, and place. The place is the number of calls that the rank had already made in
    the step. Work at the same place is compared between ranks, even if the ranks then wait in different calls.
    """
    transfer_ms: list[float] = field(default_factory=list)
    """Duration of each call after its last member has arrived."""
    call_of: list[Key] = field(default_factory=list)
    """(dimension, operation, size) of each call. Calls with equal keys are compared with each other."""
    members: list[int] = field(default_factory=list)
    """Number of ranks that post each call."""
    steps: list[int] = field(default_factory=list)
    """The steps, in order."""
    work_before_sync: Ints | None = None
    """Indices into `work_ms`, of shape (steps, ranks): the work of each rank before the step's only call. None unless
    every rank makes exactly one call in each step and waits for it at once. With these indices the graph is replayed
    without going through the programs.
    """
    step_numbers: dict[int, int] = field(default_factory=dict)
    """{step: its place in `steps`}."""

    def new_call(self, kind_of_call: Key, transfer_ms: float) -> int:
        """Add a call and return its number."""
        self.call_of.append(kind_of_call)
        self.transfer_ms.append(transfer_ms)
        self.members.append(0)
        return len(self.members) - 1

    def add_work(self, rank: int, step: int, place: int, ms: float, delay_ms: float = 0.0) -> None:
        """Add the rank's next piece of work."""
        self.delay_ms.append(min(ms, max(0.0, delay_ms)))
        self.programs.setdefault(rank, []).append((_WORK, len(self.work_ms)))
        self.work_ms.append(ms)
        self.work_at.append((rank, step, place))

    def add_post(self, rank: int, call: int) -> None:
        """Add that the rank posts a call and continues."""
        self.programs.setdefault(rank, []).append((_POST, call))
        self.members[call] += 1

    def add_wait(self, rank: int, call: int) -> None:
        """Add that the rank waits until a call is complete."""
        self.programs.setdefault(rank, []).append((_WAIT, call))

    def end_step(self, rank: int, step: int) -> None:
        """Add the end of the rank's step."""
        number = self.step_numbers.setdefault(step, len(self.steps))
        if number == len(self.steps):
            self.steps.append(step)
        self.programs.setdefault(rank, []).append((_MARK, number))


def step_ends(graph: Graph, work_ms: Sequence[float] | Floats, transfer_ms: Sequence[float] | Floats) -> Floats:
    """Return (ranks, steps) times at which steps end; NaN after a wait that never ends. Ranks in ascending order."""
    ranks = sorted(graph.programs)
    ends = np.full((len(ranks), len(graph.steps)), np.nan)
    now = dict.fromkeys(ranks, 0.0)
    place = dict.fromkeys(ranks, 0)
    missing = list(graph.members)
    latest = [0.0] * len(missing)
    waiting: dict[int, list[int]] = {}
    row = {rank: number for number, rank in enumerate(ranks)}
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        program, at, time = graph.programs[rank], place[rank], now[rank]
        while at < len(program):
            kind, number = program[at]
            if kind == _WORK:
                time += work_ms[number]
            elif kind == _POST:
                missing[number] -= 1
                latest[number] = max(latest[number], time)
                if not missing[number]:
                    ready += waiting.pop(number, [])
            elif kind == _WAIT:
                if missing[number]:
                    waiting.setdefault(number, []).append(rank)
                    break
                time = max(time, latest[number] + transfer_ms[number])
            else:
                ends[row[rank], number] = time
            at += 1
        place[rank], now[rank] = at, time
    return ends


def replay(
    graph: Graph,
    work_ms: Sequence[float] | Floats | None = None,
    transfer_ms: Sequence[float] | Floats | None = None,
) -> float:
    """Milliseconds that all steps take together, until the last rank's end; NaN if no rank reaches it."""
    work_ms = graph.work_ms if work_ms is None else work_ms
    transfer_ms = graph.transfer_ms if transfer_ms is None else transfer_ms
    if graph.work_before_sync is not None:
        return float(np.asarray(work_ms)[graph.work_before_sync].max(axis=1).sum() + np.sum(transfer_ms))
    ends = step_ends(graph, work_ms, transfer_ms)
    return float(np.fmax.reduce(ends[:, -1])) if ends.size else 0.0
