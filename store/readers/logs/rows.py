"""Convert logs to rows of `log_events` and `steps`, and infer missing ranks from other lines and files.

    events, steps = log_rows([read_log(path), ...], {path: "job.log", ...})

A line without a rank gets the rank of its file's name, of its process (torchrun and NCCL print pid and rank) or of its
GPU's bus address (NCCL prints it at start). If none is known, the rank is NULL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from store.readers.logs.file_names import host_of_log
from store.readers.logs.identities import Identities, identities
from store.readers.logs.log_file import LogEvent, LogStep, ReadLog
from store.readers.logs.step_rows import step_rows

__all__ = ["log_rows"]

_MAX_RANKS = 1_000_000
_NAMES_ITS_RANK = ("root_failure", "nccl_comm", "nonfinite", "rendezvous_timeout", "shared_seed")
"""Kinds of lines that name the rank in their text."""


def log_rows(logs: Sequence[ReadLog], names: Mapping[Any, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of `log_events` and of `steps`. `names` are the logs' paths as the report shows them."""
    known = identities(logs)
    events = [_event_row(log, event, names.get(log.path, log.path.name), known) for log in logs for event in log.events]
    steps: list[dict[str, Any]] = []
    for log in logs:
        steps += _step_rows(log, known)
    return events, _without_repeats(steps)


def _event_row(log: ReadLog, event: LogEvent, name: str, known: Identities) -> dict[str, Any]:
    prefix, fields = event.prefix, event.fields
    host = prefix.host or host_of_log(log.path)
    host = str(fields["host"]) if isinstance(fields.get("host"), str) and event.role != "context" else host
    pid = fields.get("pid", fields.get("task_pid", prefix.pid))
    pid = pid if isinstance(pid, int) else None
    if event.kind == "slurm_task" and known.has_launcher and "ranks" in fields:
        fields["tasks"] = fields.pop("ranks")
    return {
        "rank": _rank(log, event, host, pid, known),
        "wall_ns": prefix.wall_ns,
        "step": fields.get("step") if isinstance(fields.get("step"), int) else None,
        "host": host,
        "pid": pid,
        "source": name,
        "line": event.line,
        "kind": event.kind,
        "message": event.message,
        "fields": fields,
    }


def _rank(log: ReadLog, event: LogEvent, host: str | None, pid: int | None, known: Identities) -> int | None:
    prefix, fields = event.prefix, event.fields
    candidates = [fields.get("rank") if event.kind in _NAMES_ITS_RANK else None]
    if event.kind == "watchdog_timeout" and prefix.rank is None:  # std::terminate repeats the text without its prefix
        candidates = [fields.get("rank")]
    if event.role not in ("kernel", "outside"):
        candidates += [fields.get("own_rank"), prefix.rank, known.of_pid(host, prefix.pid), known.of_file(log)]
        candidates += [prefix.task if known.tasks_are_ranks else None]
    candidates += [known.of_pid(host, pid), known.of_bus(host, fields.get("bus") if event.role == "kernel" else None)]
    if event.role not in ("kernel", "outside"):
        candidates += [known.of_local(prefix.local_rank, log)]
        candidates += [
            known.of_local(fields.get("local_rank"), log)
            if event.kind in ("worker_failed", "worker_proc_died", "process_terminated", "exception")
            else None
        ]
    return next((rank for rank in candidates if isinstance(rank, int) and 0 <= rank < _MAX_RANKS), None)


def _step_rows(log: ReadLog, known: Identities) -> list[dict[str, Any]]:
    """Rows of each rank that printed steps. `committed` is NULL, since no line shows whether a step was kept."""
    by_rank: dict[int, list[LogStep]] = {}
    for line in log.steps:
        by_rank.setdefault(_writer(log, line, known), []).append(line)
    return [row for rank, lines in by_rank.items() for row in step_rows(rank, lines)]


def _writer(log: ReadLog, line: LogStep, known: Identities) -> int:
    for rank in (
        line.prefix.rank,
        known.of_file(log),
        line.prefix.task if known.tasks_are_ranks else None,
        known.of_local(line.prefix.local_rank, log),
    ):
        if rank is not None:
            return rank
    return 0


def _without_repeats(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep one row per rank and step: trainers print lines to both a file and the console."""
    kept: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        kept.setdefault((row["rank"], row["step"]), row)
    return list(kept.values())
