"""Queries of the system page: ranks and hosts, process groups, NCCL communicators, states of the profiler plugin."""

from __future__ import annotations

from typing import Any

from analyzers.run.records.event_log import parsed_detail
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["communicators", "groups", "plugin_states", "ranks"]

MAX_GROUPS = 200
MAX_COMMUNICATORS = 200
MAX_MEMBERS = 16
Rows = list[dict[str, Any]]


def ranks(source: Source) -> Rows:
    """Newest identity of each rank, with its mesh coordinates."""
    if not source.has("ranks"):
        return []
    names = (
        "host", "node_rank", "local_rank", "device", "device_uuid", "pid", "attempt", "pp", "dp_replicate", "dp_shard",
        "cp", "tp", "ep", "world_size",
    )  # fmt: skip
    picked = ", ".join(f"arg_max({name}, (attempt, wall_ns)) AS {name}" for name in names)
    rows = source.rows(f"SELECT rank, {picked} FROM ranks WHERE rank >= 0 GROUP BY rank ORDER BY rank")
    return [dict(zip(("rank", *names), row, strict=True)) for row in rows]


def groups(source: Source) -> tuple[Rows, int]:
    """Process groups of the newest attempt, largest first, and the number of groups beyond `MAX_GROUPS`."""
    if not source.has("process_groups"):
        return [], 0
    rows = source.rows(
        f"""
        SELECT process_group, any_value(description), any_value(group_name), any_value(members),
               any_value(recorded_by), count(DISTINCT rank), count(*) OVER ()
        FROM process_groups WHERE attempt = (SELECT max(attempt) FROM process_groups)
        GROUP BY process_group ORDER BY len(any_value(members)) DESC, split_part(process_group, ':', 1),
            any_value(members), process_group LIMIT {MAX_GROUPS}
        """
    )
    found = [
        {
            "group": group, "description": description or "", "torch's name": name or "",
            "size": len(members or []), "ranks": _members(members),
            "used by ranks": used, "calls recorded by": recorded_by or "wrapper",
        }
        for group, description, name, members, recorded_by, used, _ in rows
    ]  # fmt: skip
    return found, rows[0][-1] - len(rows) if rows else 0


def communicators(source: Source) -> Rows:
    """NCCL communicators that the profiler plugin saw, with one row for all ranks of a communicator."""
    if not source.has("nccl_communicators"):
        return []
    rows = source.rows(
        f"""
        SELECT attempt, comm_hash, any_value(comm_name), max(num_ranks), max(num_nodes), count(DISTINCT rank),
               max(interface_version), count(*) FILTER (finalized_ns IS NULL)
        FROM nccl_communicators GROUP BY attempt, comm_hash ORDER BY attempt DESC, 4 DESC NULLS LAST
        LIMIT {MAX_COMMUNICATORS}
        """
    )
    names = (
        "attempt", "communicator", "name", "ranks", "nodes", "ranks that recorded it", "profiler interface",
        "ranks with it open",
    )  # fmt: skip
    return [
        dict(zip(names, row, strict=True)) | {"communicator": "" if row[1] is None else f"{row[1]:x}"} for row in rows
    ]


def plugin_states(source: Source) -> Rows:
    """Count the ranks by the state of the profiler plugin and the reason for it."""
    if not source.has("events"):
        return []
    rows = source.rows(
        "SELECT rank, CAST(detail AS VARCHAR) FROM events WHERE kind = ? ORDER BY wall_ns", [event_kinds.NCCL_PLUGIN]
    )
    newest = {rank: parsed_detail(detail) for rank, detail in rows}
    counted: dict[tuple[str, str], int] = {}
    for detail in newest.values():
        key = (str(detail.get("state") or "")[:40], str(detail.get("reason") or "")[:300])
        counted[key] = counted.get(key, 0) + 1
    return [{"state": state, "reason": reason, "ranks": num} for (state, reason), num in counted.items()]


def _members(members: Any) -> str:
    known = [] if members is None else list(members)
    text = ", ".join(str(member) for member in known[:MAX_MEMBERS])
    return f"{text}, … {known[-1]}" if len(known) > MAX_MEMBERS else text
