"""Tell one late host from hosts that are all late, where only the first that lost its lead looks slow.

    is_late_as_peers(source, attempt=0, slow=straggler, peers=[0, 1, 2])

Hosts of GPUs run ahead of their devices. If all hosts become slower, the device with the smallest lead waits for its
host first, and the other ranks wait for that device. Its rank looks slow until the others have used up their leads.

1. A slow host takes longer than its peers' hosts in some phase or gap. A host that takes no longer in any of them is as
   fast as they are.
2. The host of a peer with a full launch queue blocks in every launch and thus seems as slow as a slow host. It is then
   as far ahead of its device as any host was; such peers prove nothing.
3. Hosts that wait for a result in every step are never a whole step ahead, and have no lead to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from analyzers.policy import SHARED
from analyzers.run.records.newest_steps import NEWEST_STEPS
from analyzers.source import Source, missing_tables
from analyzers.stragglers.comparison.corroboration import some_peers
from analyzers.stragglers.comparison.newest_steps import in_newest_steps
from analyzers.stragglers.comparison.peer_comparison import Straggler
from analyzers.stragglers.slow_place import host_places_ms

__all__ = ["is_late_as_peers", "leads"]


def is_late_as_peers(source: Source, attempt: int, slow: Straggler, peers: Sequence[int]) -> bool:
    """Return True if the hosts of the peers take as long as the host of the rank with a late host."""
    if missing_tables(source, "nccl_calls"):
        return False
    read = partial(host_places_ms, typical="avg" if slow.paused_ratio else "median")
    own, usual = in_newest_steps(source, attempt, slow, peers, read)
    apart_ms = [own[place] - usual[place] for place in own if place in usual]
    more_ms = sum(max(0.0, ms) for ms in apart_ms)
    if not own or not usual or more_ms >= SHARED.explained_ratio * slow.excess_ms:
        return False
    now, most = leads(source, attempt, slow, some_peers(peers, slow.rank))
    is_alike = sum(map(abs, apart_ms)) < SHARED.equal_ratio * slow.excess_ms
    return most >= 1 and (is_alike or now < SHARED.agreement_ratio * most)


def leads(source: Source, attempt: int, slow: Straggler, ranks: Sequence[int]) -> tuple[float, float]:
    """Return two leads in steps: by how much the hosts of these ranks are ahead of their devices in the newest slow
    steps, and the 0.9 quantile of their leads and the slow rank's, in these and in earlier steps. In steps of the host,
    because a full launch queue limits the number of steps, however long they take."""
    newest = max(slow.first_step, slow.last_step - NEWEST_STEPS)
    rows = source.rows(
        """
        WITH hosts AS (
            SELECT rank, step, start_ns, row_number() OVER in_order AS number,
                   coalesce(lead(start_ns) OVER in_order - start_ns, duration_ns) AS took_ns
            FROM steps WHERE attempt = $1 AND rank IN (SELECT unnest($2::INTEGER[])) AND duration_ns > 0
            WINDOW in_order AS (PARTITION BY rank ORDER BY start_ns)),
        calls AS (
            SELECT c.rank, step, kernel_start_ns, number + least((enqueue_ns - start_ns) / took_ns, 1) AS enqueued_at
            FROM nccl_calls c ASOF JOIN hosts s ON c.rank = s.rank AND s.start_ns <= c.enqueue_ns
            WHERE c.attempt = $1 AND kernel_start_ns IS NOT NULL
                  AND (step BETWEEN $3 AND $4 - 1 OR step BETWEEN $5 AND $6))
        SELECT c.rank, c.step, max(number + least((kernel_start_ns - start_ns) / took_ns, 1) - enqueued_at)
        FROM calls c ASOF JOIN hosts s ON c.rank = s.rank AND s.start_ns <= c.kernel_start_ns
        GROUP BY c.rank, c.step
        """,
        [attempt, [slow.rank, *ranks], slow.first_step - NEWEST_STEPS, slow.first_step, newest, slow.last_step],
    )
    now = [lead for rank, step, lead in rows if rank in ranks and step >= slow.first_step]
    return (float(np.median(now)), float(np.quantile([lead for *_, lead in rows], 0.9))) if now else (0.0, 0.0)
