"""SQL of the collectives page for aggregated calls: sums of older steps, and records of the NCCL plugin.

older_totals(store)       # a row per (operation, group, phase), for steps whose calls retention has removed
nccl_kernels(store)       # a row per (function, algorithm, protocol, type, channels)
nccl_transfers(store)     # a row per link: sender, peer, channel, and waits of the transfer's steps
"""

from __future__ import annotations

from typing import Any

from analyzers.source import Source

__all__ = ["nccl_channels", "nccl_kernels", "nccl_transfers", "older_totals"]

MAX_ROWS = 200
Rows = list[dict[str, Any]]


def older_totals(source: Source) -> Rows:
    """Sums of calls that are no longer stored individually, by descending wait."""
    names = ("operation", "group", "phase", "first step", "last step", "calls", "bytes", "in flight (s)", "waited (s)")
    return _rows(
        source, "collective_totals", names,
        """
        SELECT op, process_group, phase, min(step), max(step), sum(calls)::BIGINT, sum(bytes)::BIGINT,
               round(sum(duration_ns) / 1e9, 3), round(sum(wait_ns) / 1e9, 3)
        FROM collective_totals WHERE rank >= 0 AND attempt >= 0 GROUP BY ALL ORDER BY 9 DESC NULLS LAST
        """,
    )  # fmt: skip


def nccl_kernels(source: Source) -> Rows:
    """Calls as NCCL ran them: algorithm, protocol, channels, and kernel times on the GPU."""
    names = (
        "function", "algorithm", "protocol", "type", "channels", "calls", "on the GPU (ms, median)",
        "slowest channel (ms, median)", "slowest channel, most often",
    )  # fmt: skip
    return _rows(
        source, "nccl_calls", names,
        """
        SELECT function, algorithm, protocol, dtype, num_channels, count(*),
               round(median(gpu_end_ns - gpu_start_ns) / 1e6, 4), round(median(slowest_channel_ns) / 1e6, 4),
               mode(slowest_channel)
        FROM nccl_calls GROUP BY ALL ORDER BY 6 DESC
        """,
    )  # fmt: skip


def nccl_channels(source: Source) -> Rows:
    """Time of each channel in each rank's kernels on the GPU, in descending order."""
    return _rows(
        source, "nccl_channels", ("attempt", "rank", "communicator", "channel", "calls", "on the GPU (ms, median)"),
        """
        SELECT attempt, rank, communicator, channel, count(DISTINCT call),
               round(median(gpu_end_ns - gpu_start_ns) / 1e6, 4)
        FROM nccl_channels GROUP BY ALL ORDER BY 6 DESC NULLS LAST
        """,
    )  # fmt: skip


def nccl_transfers(source: Source) -> Rows:
    """Network transfers by link: bytes, and waits of the transfer's steps."""
    names = (
                "rank", "communicator", "peer in communicator", "channel", "sends", "operations", "transfers", "bytes",
                "busy (s)", "waited for the GPU (s)", "for the peer (s)", "for the network (s)",
    )  # fmt: skip
    return _rows(
        source, "nccl_links", names,
        """
        SELECT rank, communicator, peer, channel, is_send, sum(num_ops)::BIGINT, sum(num_steps)::BIGINT,
               sum(bytes)::BIGINT, round(sum(busy_ns) / 1e9, 3), round(sum(gpu_wait_ns) / 1e9, 3),
               round(sum(peer_wait_ns) / 1e9, 3), round(sum(network_wait_ns) / 1e9, 3)
        FROM nccl_links GROUP BY ALL ORDER BY 12 DESC NULLS LAST, 9 DESC NULLS LAST
        """,
    )  # fmt: skip


def _rows(source: Source, name: str, names: tuple[str, ...], sql: str) -> Rows:
    if not source.has(name):
        return []
    return [dict(zip(names, row, strict=True)) for row in source.rows(f"{sql} LIMIT {MAX_ROWS}")]
