"""Logs as rows of `log_events` and `steps`, with the ranks that other lines and files reveal.

    events, steps = log_rows([read_log(path), ...], root)

A line that names no rank gets the one of its file's name, of its process (torchrun and NCCL print pid and rank), or of
its GPU's bus number (NCCL prints it at start). What is still open stays NULL.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from store.readers.logs.file_names import host_of_log
from store.readers.logs.scan import LogEvent, LogStep, ReadLog

__all__ = ["log_rows"]

_NUM_RANKS = 1_000_000
_BUS = re.compile(r"[0-9a-f]{2}:[0-9a-f]{2}")


@dataclass(slots=True)
class _Known:
    """Ranks of processes and devices, where a line states them. A key that two ranks claim is not used."""

    by_pid: dict[tuple[str | None, int], set[int]] = field(default_factory=dict)
    by_bus: dict[tuple[str | None, str], set[int]] = field(default_factory=dict)
    tasks_are_ranks: bool = False

    def of_pid(self, host: str | None, pid: int | None) -> int | None:
        if pid is None:
            return None
        exact = self.by_pid.get((_short(host), pid), set())
        ranks = exact or {r for (_, p), found in self.by_pid.items() if p == pid for r in found}
        return next(iter(ranks)) if len(ranks) == 1 else None

    def of_bus(self, host: str | None, bus: str | None) -> int | None:
        key = bus_key(bus)
        if key is None:
            return None
        exact = self.by_bus.get((_short(host), key), set())
        ranks = exact or {r for (_, b), found in self.by_bus.items() if b == key for r in found}
        return next(iter(ranks)) if len(ranks) == 1 else None


def bus_key(bus: object) -> str | None:
    """`0000:3b:00` (kernel) and `3b000` (NCCL) as one: the bus and device, `3b:00`."""
    text = str(bus or "").lower()
    if ":" in text:
        found = _BUS.findall(text[text.find(":") + 1 :] if text.count(":") > 1 else text)
        return found[0] if found else None
    return f"{text[-5:-3].zfill(2)}:{text[-3:-1]}" if len(text) >= 4 else None


def log_rows(logs: Sequence[ReadLog], names: Mapping[Any, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of `log_events` and of `steps`. `names` are the logs' paths as the report shows them."""
    known = _known(logs)
    events = [_event_row(log, event, names.get(log.path, log.path.name), known) for log in logs for event in log.events]
    steps: list[dict[str, Any]] = []
    for log in logs:
        steps += _step_rows(log, known)
    return events, _without_repeats(steps)


def _known(logs: Sequence[ReadLog]) -> _Known:
    known = _Known()
    marked = False
    tasks: Counter[int] = Counter()
    for log in logs:
        for event in log.events:
            prefix, said = event.prefix, event.fields
            marked |= prefix.rank is not None or prefix.local_rank is not None
            if prefix.task is not None:
                tasks[prefix.task] += 1
            host = said.get("host") or prefix.host or host_of_log(log.path)
            rank = prefix.rank if prefix.rank is not None else log.rank
            if event.kind == "nccl_comm":
                rank = said.get("rank")
                if (key := bus_key(said.get("bus"))) and rank is not None:
                    known.by_bus.setdefault((_short(host), key), set()).add(rank)
            elif event.kind == "root_failure":
                rank = said.get("rank")
            pid = said.get("pid") or prefix.pid
            if rank is not None and isinstance(pid, int) and event.role in ("death", "context", "exception"):
                known.by_pid.setdefault((_short(host), pid), set()).add(rank)
    known.tasks_are_ranks = len(tasks) > 1 and not marked
    return known


def _event_row(log: ReadLog, event: LogEvent, name: str, known: _Known) -> dict[str, Any]:
    prefix, said = event.prefix, event.fields
    host = prefix.host or host_of_log(log.path)
    host = str(said["host"]) if isinstance(said.get("host"), str) and event.role != "context" else host
    pid = said.get("pid", said.get("task_pid", prefix.pid))
    pid = pid if isinstance(pid, int) else None
    return {
        "rank": _rank(log, event, host, pid, known),
        "wall_ns": prefix.wall_ns,
        "step": said.get("step") if isinstance(said.get("step"), int) else None,
        "host": host,
        "pid": pid,
        "source": name,
        "line": event.line,
        "kind": event.kind,
        "message": event.message,
        "fields": said,
    }


def _rank(log: ReadLog, event: LogEvent, host: str | None, pid: int | None, known: _Known) -> int | None:
    prefix, said = event.prefix, event.fields
    own = [said.get("rank") if event.kind in ("root_failure", "nccl_comm", "nonfinite", "rendezvous_timeout") else None]
    if event.role not in ("kernel", "outside"):
        own += [prefix.rank, known.of_pid(host, prefix.pid), log.rank]
        own += [prefix.task if known.tasks_are_ranks else None]
    own += [known.of_pid(host, pid), known.of_bus(host, said.get("bus") if event.role == "kernel" else None)]
    if event.role not in ("kernel", "outside"):
        own += [prefix.local_rank]
    return next((rank for rank in own if isinstance(rank, int) and 0 <= rank < _NUM_RANKS), None)


def _step_rows(log: ReadLog, known: _Known) -> list[dict[str, Any]]:
    """A duration that is not printed is the time between two lines of the same rank, where they have times."""
    rows: list[dict[str, Any]] = []
    counted: Counter[int] = Counter()
    before: dict[int, tuple[int, int]] = {}
    for line in log.steps:
        rank = _writer(log, line, known)
        counted[rank] += 1
        step = line.said.step if line.said.step is not None else counted[rank]
        duration_ns, now_ns = line.said.duration_ns, line.prefix.wall_ns
        last = before.get(rank)
        if duration_ns is None and now_ns is not None and last is not None and step > last[0] and now_ns > last[1]:
            duration_ns = (now_ns - last[1]) // (step - last[0])
        if now_ns is not None:
            before[rank] = (step, now_ns)
        rows.append(
            {
                "rank": rank,
                "step": step,
                "start_ns": now_ns - (duration_ns or 0) if now_ns is not None else None,
                "duration_ns": duration_ns,
                "loss": line.said.loss,
                "grad_norm": line.said.grad_norm,
                "lr": line.said.lr,
                "committed": True,
            }
        )
    return rows


def _writer(log: ReadLog, line: LogStep, known: _Known) -> int:
    for rank in (
        line.prefix.rank,
        log.rank,
        line.prefix.task if known.tasks_are_ranks else None,
        line.prefix.local_rank,
    ):
        if rank is not None:
            return rank
    return 0


def _without_repeats(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a rank and step: trainers print a line to a file and to the console."""
    kept: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        kept.setdefault((row["rank"], row["step"]), row)
    return list(kept.values())


def _short(host: str | None) -> str | None:
    return host.split(".")[0] if host and not host[:1].isdigit() else host
