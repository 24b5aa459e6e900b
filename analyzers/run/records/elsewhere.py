"""Ranks on nodes that have no records in the run's folder, for example because nodes write to local disks.

    ranks_elsewhere(source, log, attempt=0, world_size=4, last_ns=view.last_ns)      # {2, 3}
    ranks_not_here(source, attempt=0)                                                # those without any step here
    ranks_without_steps(source, attempt=0)                                           # on these nodes, too
    ranks_with_lost_calls(source, attempt=0)                                         # whose tapes are damaged

A rank without records may never have started, or may be on another node. The launcher of each node records how many
ranks it starts, and a node's ranks have consecutive numbers. A rank is elsewhere if these rules assign it to no
recorded node:

1. If any rank of a node is recorded, the node's ranks are known: the first one is that rank's number minus its local
   rank, and there are as many as the node starts.
2. If launchers without any recorded rank start at least as many ranks as are not assigned to a node, these are their
   ranks, and no rank is elsewhere.
3. If a node's launcher recorded no number of ranks, the node has all ranks below the first rank of the next known node.
"""

from __future__ import annotations

import re

from analyzers.run.records.event_log import EventLog
from analyzers.run.records.file_problems import file_problems, losses
from analyzers.source import Source, lacking
from probes.tape import event_kinds
from probes.tape.segment_index import BLANK

__all__ = ["ranks_elsewhere", "ranks_not_here", "ranks_with_lost_calls", "ranks_without_steps"]

_CALLS = re.compile(r"tapes/attempt-(\d+)/rank-(\d+)/((collectives|nccl_calls)\.|[a-z_-]*names\.jsonl$)")


def ranks_not_here(source: Source, attempt: int) -> frozenset[int]:
    """Ranks on other nodes of which no step is recorded in the run's folder."""
    if not (source.has("ranks") and source.has("steps")):
        return frozenset()
    ((world_size, started_ns),) = source.rows(
        "SELECT max(world_size), max(wall_ns) FROM ranks WHERE attempt = ?", [attempt]
    )
    ((present, last_ns),) = source.rows(
        "SELECT list(DISTINCT rank), max(start_ns) FROM steps WHERE attempt = ?", [attempt]
    )
    recorded = frozenset(present or ())  # before the attempt's first step, both results of the query are NULL
    if len(recorded) >= (world_size or 0):
        return frozenset()
    log = EventLog.load(source, (event_kinds.RUN_STARTED, event_kinds.EXCLUDED))
    return (
        ranks_elsewhere(source, log, attempt=attempt, world_size=world_size, last_ns=last_ns or started_ns) - recorded
    )


def ranks_without_steps(source: Source, attempt: int) -> frozenset[int]:
    """Ranks of which no step is recorded, on any node, though others have steps: the others may have waited for them.

    They include the ranks of a script that is attached on some ranks only, and those whose records were lost.
    """
    if not (source.has("ranks") and source.has("steps")):
        return frozenset()
    ((world_size,),) = source.rows("SELECT max(world_size) FROM ranks WHERE attempt = ?", [attempt])
    recorded = {rank for (rank,) in source.rows("SELECT DISTINCT rank FROM steps WHERE attempt = ?", [attempt])}
    return frozenset(range(world_size or 0)) - recorded if recorded else frozenset()


def ranks_with_lost_calls(source: Source, attempt: int) -> frozenset[int]:
    """Ranks of which records of calls, or the names in them, were lost: without these, another member seems to come
    last into a call, and a rank to have made fewer calls.
    """
    found = [_CALLS.match(one["path"]) for one in losses(file_problems(source)) if one["problem"] != BLANK]
    return frozenset(int(match[2]) for match in found if match and int(match[1]) == attempt)


def ranks_elsewhere(source: Source, log: EventLog, *, attempt: int, world_size: int, last_ns: int) -> frozenset[int]:
    """Numbers of the ranks on other nodes. `log` has the events `run_started` and `excluded`, `last_ns` is the
    attempt's newest record.
    """
    places = _places(source, attempt)
    others = set(range(world_size)) - places.keys()
    first = {node: rank - local_rank for rank, (node, local_rank) in places.items()}
    if not others or not first:
        return frozenset()
    sizes = _started(log, attempt, last_ns)
    begins = sorted(first.values())
    for node, begin in first.items():
        after = next((other for other in begins if other > begin), world_size)
        others -= set(range(begin, begin + sizes[node] if node in sizes else after))
    unplaced = sum(size for node, size in sizes.items() if node not in first)
    return frozenset() if len(others) <= unplaced else frozenset(others)


def _places(source: Source, attempt: int) -> dict[int, tuple[int, int]]:
    """{rank: (node, rank within the node)} of the ranks that recorded both."""
    if lacking(source, ranks=("node_rank", "local_rank")):
        return {}
    rows = source.rows(
        "SELECT rank, arg_max(node_rank, wall_ns), arg_max(local_rank, wall_ns) FROM ranks "
        "WHERE attempt = ? AND rank >= 0 GROUP BY rank",
        [attempt],
    )
    return {rank: (node, local) for rank, node, local in rows if None not in (node, local)}


def _started(log: EventLog, attempt: int, last_ns: int) -> dict[int, int]:
    """{node: number of ranks that its launcher starts in an attempt}, without excluded devices."""
    sizes = {
        event.integer("node_rank", 0): event.integer("nproc_per_node")
        for event in log.of(event_kinds.RUN_STARTED)
        if event.wall_ns <= last_ns and event.integer("nproc_per_node") > 0
    }
    for event in log.of(event_kinds.EXCLUDED):
        if event.attempt < attempt and event.text("device") and event.integer("node_rank") in sizes:
            sizes[event.integer("node_rank")] -= 1
    return sizes
