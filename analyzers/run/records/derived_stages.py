"""Order of a pipeline whose ranks recorded no place in a mesh, from senders and receivers.

    stages_of_messages(store, attempt=0)         # {0: 0, 1: 1, 2: 2, 3: 3}

The first stage begins with a send, every other one with a receive from the stage before it. Ranks that exchange
messages in another pattern (a ring) have no order, and nothing is returned.
"""

from __future__ import annotations

from collections.abc import Mapping

from analyzers.source import Source

__all__ = ["stages_of_messages"]

FIRST_STEPS = 2
"""Steps at the start of an attempt that are read; senders and receivers do not change."""


def stages_of_messages(source: Source, attempt: int) -> dict[int, int]:
    """{rank: position} of every rank of the attempt that sends or receives; empty where these are not chains."""
    if not source.has("collectives"):
        return {}
    rows = source.rows(
        """
        SELECT rank, arg_min(op, issue_ns), arg_min(peer, issue_ns) FROM collectives
        WHERE attempt = ? AND op IN ('send', 'recv') AND peer IS NOT NULL
          AND step <= (SELECT min(step) FROM collectives WHERE attempt = ?) + ?
        GROUP BY rank
        """,
        [attempt, attempt, FIRST_STEPS],
    )
    before = {int(rank): None if op == "send" else int(peer) for rank, op, peer in rows}
    return _positions(before)


def _positions(before: Mapping[int, int | None]) -> dict[int, int]:
    """Positions along chains of {rank: the rank before it}; empty unless all chains are whole and of one length."""
    positions: dict[int, int] = {}
    for rank in before:
        chain = [rank]
        while (previous := before.get(chain[-1], -1)) is not None:
            if previous < 0 or previous in chain:
                return {}
            chain.append(previous)
        positions[rank] = len(chain) - 1
    num_first = sum(position == 0 for position in positions.values())
    counts = [list(positions.values()).count(position) for position in set(positions.values())]
    return positions if len(counts) > 1 and all(count == num_first for count in counts) else {}
