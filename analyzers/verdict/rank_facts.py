"""Facts about the ranks of a run: their number, the world size, nodes, devices and mesh.

facts = rank_facts(source)
facts["num_ranks"], facts["world_size"]             # 3, 4: one rank of the newest attempt has no records
"""

from __future__ import annotations

from typing import Any

from analyzers.source import Source

__all__ = ["rank_facts"]


def rank_facts(source: Source) -> dict[str, Any]:
    """Ranks of the run. The number is taken from the newest attempt, because an elastic world shrinks and grows."""
    facts: dict[str, Any] = {"num_ranks": None, "world_size": None, "num_ranks_before": [], "num_nodes": None}
    facts |= {"devices": [], "mesh": {}}
    if not source.has("ranks"):
        return facts
    ((num_ranks, num_nodes),) = source.rows(
        "SELECT count(DISTINCT rank), count(DISTINCT host) FROM ranks WHERE rank >= 0"
    )
    worlds = source.rows(
        "SELECT attempt, max(world_size), count(DISTINCT rank) FROM ranks WHERE rank >= 0 GROUP BY 1 ORDER BY 1"
    )
    if sizes := [min(size, num_ranks) for _, size, _ in worlds if size]:
        facts["num_ranks_before"] = sorted({*sizes} - {sizes[-1]})
        facts["world_size"] = next(size for _, size, _ in reversed(worlds) if size)
        attempt, _, present = worlds[-1]
        # In an attempt that has just begun, some ranks have not recorded themselves or their place in the mesh.
        num_ranks = present if present < sizes[-1] and _has_finished_step(source, attempt) else sizes[-1]
    newest = worlds[-1][0] if facts["num_ranks_before"] and worlds[-1][2] == num_ranks else None
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    largest = ", ".join(f"max({name}) + 1" for name in names)
    ((*extents,),) = source.rows(f"SELECT {largest} FROM ranks WHERE attempt = coalesce(?, attempt)", [newest])
    kinds = source.rows("SELECT DISTINCT split_part(device, ':', 1) FROM ranks WHERE device IS NOT NULL ORDER BY 1")
    facts |= {"num_ranks": num_ranks, "num_nodes": num_nodes, "devices": [kind for (kind,) in kinds]}
    if num_ranks < (facts["world_size"] or 0):  # the ranks without records may have the highest coordinates
        return facts
    facts["mesh"] = {name: size for name, size in zip(names, extents, strict=True) if size and size > 1}
    return facts


def _has_finished_step(source: Source, attempt: int) -> bool:
    sql = "SELECT 1 FROM steps WHERE attempt = ? AND duration_ns IS NOT NULL LIMIT 1"
    return source.has("steps") and bool(source.rows(sql, [attempt]))
