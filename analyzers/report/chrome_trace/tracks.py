"""Processes and threads of a trace: their numbers, names and order.

    tracks = Tracks({0: "node-0, cuda:0"})
    yield from tracks.thread(0, PHASES)         # metadata events, the first time only

Each rank is a process with the rank's number. One more process holds what belongs to the whole run, and each node has
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from analyzers.report.chrome_trace.plain_values import text
from analyzers.source import Source

__all__ = ["ATTEMPTS", "CALLS", "EVENTS", "PHASES", "RUN", "STAGES", "STEPS", "Tracks", "places_of"]

RUN = 1_000_000
"""Process number of the run; the numbers of the nodes follow."""
EVENTS, ATTEMPTS = 0, 1
"""Threads of the run."""
STEPS, PHASES, STAGES, CALLS = 0, 1, 100, 1000
"""Threads of a rank: steps, phases, first stage, first lane of collectives."""


class Tracks:
    """Metadata events of processes and threads, each returned once."""

    def __init__(self, places: Mapping[int, str]) -> None:
        self._places = places
        self._announced: set[tuple[int, int | None]] = set()
        self._nodes: dict[str, int] = {}

    def node(self, name: str) -> int:
        """The process of a node."""
        return self._nodes.setdefault(name, RUN + 1 + len(self._nodes))

    def process(self, pid: int) -> Iterator[dict[str, Any]]:
        """Name, order and label of a process: the run first, then the ranks, then the nodes."""
        if (pid, None) in self._announced:
            return
        self._announced.add((pid, None))
        nodes = {number: name for name, number in self._nodes.items()}
        name = "run" if pid == RUN else text(f"node {nodes[pid]}") if pid in nodes else f"rank {pid}"
        yield _metadata("process_name", pid, name=name)
        yield _metadata("process_sort_index", pid, sort_index=-1 if pid == RUN else pid)
        if pid in self._places:
            yield _metadata("process_labels", pid, labels=text(self._places[pid]))

    def thread(self, pid: int, tid: int) -> Iterator[dict[str, Any]]:
        """Name and order of a thread. They follow the name and order of its process."""
        if (pid, tid) in self._announced:
            return
        yield from self.process(pid)
        self._announced.add((pid, tid))
        yield _metadata("thread_name", pid, tid, name=_thread_name(pid, tid))
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def places_of(source: Source) -> dict[int, str]:
    """{rank: its newest host and device}."""
    if not source.has("ranks"):
        return {}
    rows = source.rows(
        "SELECT rank, concat_ws(', ', arg_max(host, wall_ns), arg_max(device, wall_ns)) FROM ranks "
        "WHERE rank >= 0 GROUP BY rank"
    )
    return {int(rank): str(place) for rank, place in rows if place}


def _metadata(what: str, pid: int, tid: int | None = None, **args: Any) -> dict[str, Any]:
    event = {"ph": "M", "name": what, "pid": pid, "args": args}
    return event if tid is None else event | {"tid": tid}


def _thread_name(pid: int, tid: int) -> str:
    if pid >= RUN:
        return {EVENTS: "events", ATTEMPTS: "attempts"}[tid]
    if tid >= CALLS:
        return f"collectives {tid - CALLS}"
    return {STEPS: "steps", PHASES: "phases"}.get(tid) or f"stage {tid - STAGES}"
