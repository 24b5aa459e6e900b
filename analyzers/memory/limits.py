"""Hosts and devices near the limit of their memory.

    found = limits(store)                      # kind memory_limit: fired, or advice

1. Readings of table `health` above `nearly_all_ratio` of the total give a warning for a host, but only advice for a
   device: its readings include the cache of torch's allocator, which can be released. They also include other
   processes; the finding says so if tensors of the run's ranks are only a small part.
2. Retries of the allocator (events `allocation_retries`) give a warning for a device: memory was short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.records.event_log import Event, EventLog
from analyzers.source import Source, lacking
from analyzers.wording import size_text
from probes.tape import event_kinds

__all__ = ["limits"]


def limits(source: Source) -> list[Finding]:
    """At most one finding for hosts and one for devices; a warning about allocator retries replaces the advice."""
    short = _retries(source)
    return short + [found for found in _readings(source) if not short or found.status != "advice"]


def _readings(source: Source) -> list[Finding]:
    if lacking(source, health=("memory_used_bytes", "memory_total_bytes")):
        return []  # reported by `health`
    rows = source.rows(
        """
        SELECT node, device, max(memory_used_bytes), max(memory_total_bytes),
               max_by(memory_used_bytes, sample_ns) FROM health
        WHERE memory_total_bytes > 0 AND memory_used_bytes IS NOT NULL GROUP BY node, device
        HAVING max(memory_used_bytes / memory_total_bytes) >= ? ORDER BY 3 DESC
        """,
        [SHARED.nearly_all_ratio],
    )
    hosts, devices = [row for row in rows if row[1] == "host"], [row for row in rows if row[1] != "host"]
    return [_limit(source, of_kind) for of_kind in (hosts, devices) if of_kind]


def _recorded_bytes(source: Source, ranks: Sequence[int]) -> int | None:
    """Sum of the ranks' peak tensor memory; None if not recorded."""
    peaks: dict[int, int] = {}
    for event in EventLog.load(source, (event_kinds.MEMORY_PEAK,)).of(event_kinds.MEMORY_PEAK):
        peaks[event.rank] = max(peaks.get(event.rank, 0), event.integer("allocated_bytes", 0))
    known = [peaks[rank] for rank in ranks if peaks.get(rank)]
    return sum(known) if known and len(known) == len(ranks) else None


def _limit(source: Source, rows: Sequence[tuple[Any, ...]]) -> Finding:
    node, device, highest, total, newest = rows[0]
    on_host = device == "host"
    where = f"Host {node}" if on_host else f"Device {device} of {node}"
    more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    use = f"{where} had {size_text(highest)} of {size_text(total)} in use ({100 * highest / total:.1f} %){more}"
    risk = "the next larger batch, checkpoint or process may run out of memory"
    ranks = _ranks_on(source, str(node), str(device))
    cached = "much of it may be the cache of torch's allocator, which rarely had to empty it"
    recorded = None if on_host else _recorded_bytes(source, ranks)
    if recorded is not None and recorded < SHARED.large_share_ratio * highest:
        cached = (
            f"its ranks recorded at most {size_text(recorded)} of tensors, so other processes or torch's allocator "
            "cache hold the rest"
        )
    return Finding(
        analyzer="memory",
        kind="memory_limit",
        severity="warning" if on_host else "info",
        status="fired" if on_host else "advice",
        ranks=ranks,
        cause="host" if on_host else "device",
        summary=f"{use}: {risk if on_host else cached}.",
        evidence={
            "highest_bytes": int(highest),
            "newest_bytes": int(newest),
            "total_bytes": int(total),
            "used_ratio": round(highest / total, 4),
            "num_places": len(rows),
        }
        | ({} if recorded is None else {"recorded_bytes": recorded}),
        advice="memory-limit",
    )


def _retries(source: Source) -> list[Finding]:
    """Ranks on which the allocator was repeatedly short of memory, in the newest attempt with retries."""
    log = EventLog.load(source, (event_kinds.ALLOCATION_RETRIES,))
    events = log.of(event_kinds.ALLOCATION_RETRIES)
    newest = max((event.attempt for event in events), default=0)
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        if event.attempt == newest and event.rank >= 0:
            by_rank.setdefault(event.rank, []).append(event)
    short = {rank: retries for rank, retries in by_rank.items() if len(retries) >= SHARED.min_times}
    if not short:
        return []
    worst = max(short, key=lambda rank: len(short[rank]))
    steps = [event.step for retries in short.values() for event in retries if event.step is not None]
    held = {
        name: most
        for name in ("allocated_bytes", "reserved_bytes")
        if (most := max(event.integer(name) for event in short[worst])) >= 0  # negative: not recorded by the allocator
    }
    sizes = ""
    if len(held) == 2:
        sizes = f", with {size_text(held['allocated_bytes'])} in use and {size_text(held['reserved_bytes'])} reserved"
    count = sum(event.integer("num_retries") for event in short[worst])
    more = f" (and {len(short) - 1} more ranks)" if len(short) > 1 else ""
    return [
        Finding(
            analyzer="memory",
            kind="memory_limit",
            severity="warning",
            status="fired",
            ranks=tuple(sorted(short)),
            first_step=min(steps, default=None),
            last_step=max(steps, default=None),
            cause="allocator",
            summary=f"The GPU of rank {worst}{more} ran short of memory {count} times: its allocator emptied its cache "
            f"and retried{sizes}.",
            evidence={
                "num_retries": count,
                "num_seconds_with_retries": len(short[worst]),
                **held,
            },
            advice="memory-limit",
            attempt=newest,
        )
    ]


def _ranks_on(source: Source, node: str, device: str) -> tuple[int, ...]:
    if lacking(source, ranks=("host",)):
        return ()
    rows = source.rows(
        "SELECT DISTINCT rank FROM ranks WHERE rank >= 0 "
        "AND CASE WHEN ? = 'host' THEN host = ? ELSE device_uuid = ? END ORDER BY rank",
        [device, node, device],
    )
    return tuple(rank for (rank,) in rows)
