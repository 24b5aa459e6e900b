"""Find the rank of a line by its process, device, file or local rank, from what other lines and files state.

    known = identities(logs)
    known.of_pid("gpu-01", 71), known.of_bus("gpu-01", "0000:3b:00")

1. A key that two ranks claim is not used. A key of another host is not used either, if both hosts are known.
2. NCCL numbers ranks per communicator: only the numbers in the largest one are ranks of the job.
3. A local rank is used as a rank only if nothing suggests several nodes.
4. An srun task is used as a rank only if no launcher ran in it, since a launcher starts several ranks.
5. A file that states a rank and its local rank belongs to one node, so its other local ranks have the same offset.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.readers.logs.file_names import host_of_log, is_of_a_later_node, local_rank_of_log
from store.readers.logs.log_file import LogEvent, ReadLog

__all__ = ["Identities", "bus_key", "identities"]

MAX_RANKS_OF_A_NODE = 16
"""A job with a higher rank has several nodes, since the largest single-OS machines have 16 devices."""
_BUS = re.compile(r"[0-9a-f]{2}:[0-9a-f]{2}")


@dataclass(slots=True)
class Identities:
    """Ranks of processes, devices and files, as stated in lines."""

    by_pid: dict[tuple[str | None, int], set[int]] = field(default_factory=dict)
    by_bus: dict[tuple[str | None, str], set[int]] = field(default_factory=dict)
    by_file: dict[Path, set[int]] = field(default_factory=dict)
    offsets: dict[Path, set[int]] = field(default_factory=dict)
    """Rank minus local rank, for each file with lines that state both."""
    tasks_are_ranks: bool = False
    """True if srun's task labels are ranks."""
    has_launcher: bool = False
    """True if a launcher ran, so that srun's tasks are launchers."""
    local_is_rank: bool = True

    def of_pid(self, host: str | None, pid: int | None) -> int | None:
        return None if pid is None else _only(self.by_pid, short(host), pid)

    def of_bus(self, host: str | None, bus: str | None) -> int | None:
        key = bus_key(bus)
        return None if key is None else _only(self.by_bus, short(host), key)

    def of_local(self, local_rank: int | None, log: ReadLog) -> int | None:
        offsets = self.offsets.get(log.path, set())
        if local_rank is not None and len(offsets) == 1:
            return local_rank + next(iter(offsets))
        return local_rank if self.local_is_rank and not offsets else None

    def of_file(self, log: ReadLog) -> int | None:
        """Rank of the process that this file belongs to."""
        local_rank = local_rank_of_log(log.path)
        if log.rank is not None or local_rank is None:
            return log.rank
        stated = self.by_file.get(log.path, set())
        return next(iter(stated)) if len(stated) == 1 else self.of_local(local_rank, log)


def _only(known: dict[tuple[str | None, Any], set[int]], host: str | None, key: object) -> int | None:
    """The only rank with this key on the host. If one of the two hosts is unknown, ranks on any host count."""
    ranks = known.get((host, key), set())
    if not ranks:
        hosts = {other for other, _ in known if other is not None}
        ranks = {rank for (other, one), found in known.items() if one == key and (other is None or host is None
                 or len(hosts) == 1) for rank in found}  # fmt: skip
    return next(iter(ranks)) if len(ranks) == 1 else None


def bus_key(bus: object) -> str | None:
    """Normalise `0000:3b:00` (kernel) and `3b000` (NCCL) to bus and device, `3b:00`."""
    text = str(bus or "").lower()
    if ":" in text:
        found = _BUS.findall(text[text.find(":") + 1 :] if text.count(":") > 1 else text)
        return found[0] if found else None
    return f"{text[-5:-3].zfill(2)}:{text[-3:-1]}" if len(text) >= 4 else None


def short(host: str | None) -> str | None:
    """Host name without its domain; IP addresses are unchanged."""
    return host.split(".")[0] if host and not host[:1].isdigit() else host


def identities(logs: Sequence[ReadLog]) -> Identities:
    """Collect what all lines of all files state about ranks."""
    known = Identities()
    events = [(log, event) for log in logs for event in log.events]
    sizes = [size for _, event in events if isinstance(size := event.fields.get("world_size"), int)]
    is_marked, tasks = False, Counter[int]()
    for log, event in events:
        prefix = event.prefix
        is_marked |= prefix.rank is not None or prefix.local_rank is not None
        known.has_launcher |= event.kind in ("launcher", "worker_failed", "root_failure", "agent_signalled")
        if prefix.task is not None:
            tasks[prefix.task] += 1
        if prefix.rank is not None:
            known.by_file.setdefault(log.path, set()).add(prefix.rank)
        _take_offset(known, log, event)
        _take(known, log, event, max(sizes, default=0))
    tasks.update(task for log in logs for task in log.tasks)
    for prefix in (line.prefix for log in logs for line in log.steps):
        is_marked |= prefix.rank is not None or prefix.local_rank is not None
        tasks.update(() if prefix.task is None else (prefix.task,))
    known.tasks_are_ranks = len(tasks) > 1 and not is_marked and not known.has_launcher
    known.local_is_rank = not _several_nodes(logs, sizes)
    return known


def _take(known: Identities, log: ReadLog, event: LogEvent, world_size: int) -> None:
    prefix, fields = event.prefix, event.fields
    host = short(fields.get("host") or prefix.host or host_of_log(log.path))
    rank = prefix.rank if prefix.rank is not None else log.rank
    if event.kind == "nccl_comm":
        rank = fields.get("rank") if fields.get("world_size") == world_size else None
        if rank is not None and (key := bus_key(fields.get("bus"))):
            known.by_bus.setdefault((host, key), set()).add(rank)
    elif event.kind == "nccl_proxy":
        rank = fields.get("rank") if fields.get("rank") == fields.get("from") else None
    elif event.kind == "root_failure":
        rank = fields.get("rank")
    for pid_and_rank in filter(None, fields.get("processes", "").split(", ")):
        pid_text, _, rank_text = pid_and_rank.partition("=")
        known.by_pid.setdefault((None, int(pid_text)), set()).add(int(rank_text))
    pid = fields.get("pid") or prefix.pid
    if rank is not None and isinstance(pid, int) and event.role in ("death", "context", "exception"):
        known.by_pid.setdefault((host, pid), set()).add(rank)


def _take_offset(known: Identities, log: ReadLog, event: LogEvent) -> None:
    rank, local_rank = event.prefix.rank, event.prefix.local_rank
    if event.kind == "root_failure":
        rank, local_rank = event.fields.get("rank"), event.fields.get("local_rank")
    if rank is not None and local_rank is not None and rank >= local_rank:
        known.offsets.setdefault(log.path, set()).add(rank - local_rank)


def _several_nodes(logs: Sequence[ReadLog], sizes: Sequence[int]) -> bool:
    """Return True if anything suggests that the job had more than one node."""
    hosts: set[str | None] = set()
    folders: dict[str, set[Path]] = {}
    labelled: Counter[int] = Counter()
    launched = [log for log in logs if any(event.kind in ("worker_failed", "root_failure") for event in log.events)]
    if len(launched) > 1 or any(is_of_a_later_node(log.path) for log in logs):
        return True
    for log in logs:
        if local_rank_of_log(log.path) is not None:
            attempt = log.path.parent.parent
            folders.setdefault(attempt.name, set()).add(attempt)
        labelled.update({event.prefix.local_rank for event in log.events if event.prefix.local_rank is not None})
        for event in log.events:
            rank, local_rank = event.fields.get("rank"), event.fields.get("local_rank")
            if event.kind == "root_failure" and rank is not None and local_rank is not None and rank != local_rank:
                return True
            if (event.fields.get("nnodes") or 1) != 1 or (event.prefix.rank or 0) >= MAX_RANKS_OF_A_NODE:
                return True
            if event.role not in ("kernel", "outside"):
                hosts.add(short(event.prefix.host))
    return (
        len(hosts - {None}) > 1
        or max(sizes, default=0) > MAX_RANKS_OF_A_NODE
        or max(labelled.values(), default=0) > 1
        or any(len(found) > 1 for found in folders.values())
    )
