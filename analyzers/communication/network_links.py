"""Links between nodes, and how long their senders wait for the network, from records of NCCL's proxy threads.

    for link in network_links(source, attempt=0):
        link.rank, link.peer, link.channel, link.factor

A slow link slows its whole ring, so all members of a group see the same slow call. Only the sender on the slow link
waits for the network; the others wait for data or for credit. The plugin records these waits if `steps` are requested
(docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from analyzers.communication.policy import NetworkLinkPolicy
from analyzers.policy import SHARED
from analyzers.robust import others_median
from analyzers.source import Source, missing_tables

__all__ = ["NetworkLink", "network_links", "slowest_link", "stalled_link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """Transfers from one rank to another over one channel."""

    rank: int
    peer: int
    channel: int
    factor: float = 1.0
    """Time per byte that the sender waited for its network, relative to the median of all other links."""

    @property
    def text(self) -> str:
        """The link as part of a sentence: `rank 3 to rank 4, channel 1`."""
        return f"rank {self.rank} to rank {self.peer}, channel {self.channel}"


_GROUPED = """
FROM nccl_links l JOIN nccl_groups g USING (attempt, rank, communicator)
WHERE l.attempt = ? AND len(g.members) > l.peer
"""


def network_links(source: Source, attempt: int, policy: NetworkLinkPolicy | None = None) -> list[NetworkLink]:
    """All links that moved enough bytes to be compared, with their factors; empty without such records."""
    policy = policy or NetworkLinkPolicy()
    if missing_tables(source, "nccl_links", "nccl_groups"):
        return []
    rows = source.rows(
        f"""
        SELECT l.rank, g.members[l.peer + 1] AS other, l.channel, sum(l.network_wait_ns)::DOUBLE / sum(l.bytes)
        {_GROUPED} AND l.is_send AND l.network_wait_ns IS NOT NULL
        GROUP BY ALL HAVING sum(l.bytes) >= ? ORDER BY ALL
        """,
        [attempt, policy.min_bytes],
    )
    waits = np.array([[wait] for *_, wait in rows])
    factors = (waits / np.maximum(others_median(waits), 1e-9))[:, 0] if len(rows) > 1 else np.ones(len(rows))
    return [
        NetworkLink(rank=rank, peer=int(peer), channel=channel, factor=float(factor))
        for (rank, peer, channel, _), factor in zip(rows, factors, strict=True)
    ]


def slowest_link(source: Source, attempt: int, ranks: Collection[int]) -> NetworkLink | None:
    """The slow link between two of these ranks; None if none is slow, or if slow links join different pairs."""
    slow = [
        link
        for link in network_links(source, attempt)
        if link.factor >= SHARED.beyond_few_factor and link.rank in ranks and link.peer in ranks
    ]
    if not slow or len({(link.rank, link.peer) for link in slow}) > 1:
        return None
    return max(slow, key=lambda link: link.factor)


def stalled_link(source: Source, attempt: int, group: str, seq: int) -> NetworkLink | None:
    """The link on which a stuck call made the least progress; None if several tie, or nothing was recorded."""
    if missing_tables(source, "nccl_links", "nccl_groups", "nccl_calls"):
        return None
    rows = source.rows(
        f"""
        SELECT CASE WHEN l.is_send THEN l.rank ELSE g.members[l.peer + 1] END AS sender,
               CASE WHEN l.is_send THEN g.members[l.peer + 1] ELSE l.rank END AS receiver, l.channel,
               min(l.op_steps_done) AS done
        FROM nccl_calls c JOIN (
            SELECT l.*, g.process_group, g.members {_GROUPED}
        ) l ON l.rank = c.rank AND l.communicator = c.communicator AND l.op_call = c.call
        JOIN nccl_groups g ON g.attempt = c.attempt AND g.rank = c.rank AND g.communicator = c.communicator
        WHERE c.attempt = ? AND g.process_group = ? AND c.seq = ? AND l.op_start_ns IS NOT NULL
          AND l.op_steps_done IS NOT NULL
        GROUP BY ALL ORDER BY done
        """,
        [attempt, attempt, group, seq],
    )
    pairs = {(sender, receiver) for sender, receiver, _, done in rows if done == rows[0][3]}
    if len(pairs) != 1:
        return None
    sender, receiver, channel, _ = rows[0]
    return NetworkLink(rank=int(sender), peer=int(receiver), channel=channel)
