"""Counters of a trace: loss and tokens per second of the run, load of devices and hosts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from analyzers.report.chrome_trace.choice import CHUNK_ROWS, TraceChoice, row_parts
from analyzers.report.chrome_trace.clock import TraceClock
from analyzers.report.chrome_trace.plain_values import text
from analyzers.report.chrome_trace.tracks import RUN, Tracks
from analyzers.run.records.token_copies import token_copies
from analyzers.source import Source

__all__ = ["device_counters", "run_counters"]


def run_counters(source: Source, choice: TraceChoice, clock: TraceClock, tracks: Tracks) -> Iterator[dict[str, Any]]:
    """Loss and tokens per second at the end of each execution of a step, over all ranks, including ranks that are not
    in the trace.
    """
    if not source.has("steps"):
        return
    copies = token_copies(source)
    for attempt, part in row_parts(source, "steps", choice.with_all_ranks):
        for at_ns, loss, tokens_per_s in source.rows(
            f"""
            WITH executed AS (
                SELECT *, row_number() OVER (PARTITION BY rank, step ORDER BY start_ns) AS execution FROM steps
                WHERE attempt = ? AND rank >= 0 AND start_ns > 0 AND duration_ns > 0 AND {part})
            SELECT max(start_ns + duration_ns), arg_min(loss, rank) FILTER (loss IS NOT NULL),
                   CAST(sum(tokens) AS DOUBLE) / (median(duration_ns) / 1e9)
            FROM executed GROUP BY step, execution ORDER BY 1
            """,
            [attempt],
        ):
            values = {"loss": loss, "tokens/s": None if tokens_per_s is None else tokens_per_s / copies}
            for name, value in values.items():
                if value is not None and math.isfinite(value):  # the format has no NaN
                    yield from tracks.process(RUN)
                    yield _counter(RUN, name, clock.us(at_ns), value)


def device_counters(source: Source, choice: TraceChoice, clock: TraceClock, tracks: Tracks) -> Iterator[dict[str, Any]]:
    """Busy share of each device, on the track of its rank, and of each host's CPUs, on the track of its node."""
    if not source.has("health"):
        return
    ranks = _ranks_of_devices(source)
    condition = "sample_ns > 0" + ("" if choice.attempt is None else f" AND attempt = {int(choice.attempt)}")
    if (window := choice.window(source)) is not None:
        condition += f" AND sample_ns BETWEEN {window[0]} AND {window[1]}"
    ((num_rows, first_ns, last_ns),) = source.rows(
        f"SELECT count(*), min(sample_ns), max(sample_ns) FROM health WHERE {condition}"
    )
    if not num_rows:
        return
    length_ns = max(1, (last_ns - first_ns + 1) * CHUNK_ROWS // num_rows)
    for begin_ns in range(first_ns, last_ns + 1, length_ns):
        for at_ns, node, device, load in source.rows(
            "SELECT sample_ns, coalesce(node, ''), coalesce(device, ''), coalesce(gpu_utilization_ratio, "
            f"cpu_utilization_ratio) FROM health WHERE {condition} AND sample_ns >= ? AND sample_ns < ? ORDER BY 1",
            [begin_ns, begin_ns + length_ns],
        ):
            rank = ranks.get(device)
            if (
                load is None
                or not math.isfinite(load)
                or (choice.ranks and rank is not None and rank not in choice.ranks)
            ):
                continue
            pid = tracks.node(node) if rank is None else rank
            yield from tracks.process(pid)
            name = "CPU busy (%)" if device == "host" else text(f"{device} busy (%)")
            yield _counter(pid, name, clock.us(at_ns), 100 * load)


def _ranks_of_devices(source: Source) -> dict[str, int]:
    """{UUID of a device: the lowest rank that runs on it}."""
    if not source.has("ranks"):
        return {}
    rows = source.rows("SELECT device_uuid, min(rank) FROM ranks WHERE rank >= 0 AND device_uuid <> '' GROUP BY 1")
    return {str(device): int(rank) for device, rank in rows}


def _counter(pid: int, name: str, ts: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "ts": ts, "args": {"value": value}}
