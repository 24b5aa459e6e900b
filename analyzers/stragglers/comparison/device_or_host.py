"""Decide whether the device or the host of a slow rank on a GPU delays its calls.

    late_side(source, timings, slow=straggler, peers=[0, 1, 2])             # "device", "host", or "" if unknown
    is_late_as_peers(source, attempt=0, slow=straggler, peers=[0, 1, 2])    # True if all hosts are as late

With stamped steps, the side is decided by the part of the rank's excess in which its device waited for its host.
Without stamps, one call of each slow step is examined: the one before which the rank spent the most time. If the host
had launched it before the device's preceding work began, the device was late. If its kernel started as soon as it was
launched, the host was late. Otherwise (the device waited for its host and then worked) the host's lead
decides: a host that is a whole step ahead is not late, and a host that has lost such a lead is late.

If all hosts become slower, the device with the smallest lead waits for its host first, and the other ranks wait for
that device. Its rank looks slow until the others have used up their leads:

1. A slow host takes longer than its peers' hosts in some phase or gap. A host that takes no longer in any of them is as
   fast as they are.
2. The host of a peer with a full launch queue blocks in every launch and thus seems as slow as a slow host. It is then
   as far ahead of its device as any host was, and is not counted as slow.
3. Hosts that wait for a result in every step are never a whole step ahead, and have no lead to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from analyzers.account.time_classes import GAPS, OWN_PHASES, late
from analyzers.account.timings import Timings
from analyzers.policy import SHARED
from analyzers.run.records.newest_steps import NEWEST_STEPS
from analyzers.source import Source, missing_tables
from analyzers.stragglers.comparison.corroboration import MAX_STEPS, some_peers
from analyzers.stragglers.comparison.peer_comparison import Straggler
from analyzers.stragglers.slow_place import host_places_ms, in_newest_steps

__all__ = ["is_late_as_peers", "late_side"]


def late_side(source: Source, timings: Timings, slow: Straggler, peers: Sequence[int]) -> str:
    """Return the side that is late in most of the slow steps."""
    attempt = timings.attempt
    if timings.is_stamped:
        return _stamped_side(source, attempt, slow, peers)
    if missing_tables(source, "nccl_calls"):
        return ""
    first, share = max(slow.first_step, slow.last_step - MAX_STEPS), slow.paused_ratio or 1.0
    ((num_steps, by_device, by_host),) = source.rows(
        """
        -- before_ns: end of the kernel before; handed_over_ns: from then to the launch; took_ns: from then to the start
        WITH calls AS (
            SELECT s.step, c.launched_ns, c.kernel_start_ns,
                   max(c.kernel_end_ns) OVER (ORDER BY c.kernel_start_ns
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_ns
            FROM nccl_calls c ASOF JOIN (SELECT step, start_ns FROM steps WHERE attempt = ? AND rank = ?) s
                 ON s.start_ns <= c.enqueue_ns
            WHERE c.attempt = ? AND c.rank = ? AND c.launched_ns IS NOT NULL AND c.kernel_end_ns IS NOT NULL),
        latest AS (
            SELECT step, arg_max(launched_ns - before_ns, kernel_start_ns - before_ns) AS handed_over_ns,
                   max(kernel_start_ns - before_ns) AS took_ns
            FROM calls WHERE step BETWEEN ? AND ? AND kernel_start_ns > before_ns GROUP BY step
            -- for a rank that pauses, only the steps with the longest gaps
            QUALIFY row_number() OVER (ORDER BY took_ns DESC) <= ceil(? * count(*) OVER ()))
        SELECT count(*), count(*) FILTER (handed_over_ns <= 0), count(*) FILTER (handed_over_ns >= ? * took_ns)
        FROM latest
        """,
        [attempt, slow.rank, attempt, slow.rank, first, slow.last_step, share, 1 - SHARED.equal_ratio],
    )
    least = SHARED.agreement_ratio * num_steps
    if num_steps and by_device >= least:
        return "device"
    if num_steps and by_host >= least:
        return "host"
    now, most = _leads(source, attempt, slow, [slow.rank])
    return "" if most < 1 or slow.paused_ratio else "device" if now >= 1 else "host"


def _stamped_side(source: Source, attempt: int, slow: Straggler, peers: Sequence[int]) -> str:
    read = partial(_late_ms, typical="avg" if slow.paused_ratio else "median")
    found = in_newest_steps(source, attempt, slow, peers, read)
    if not slow.has_peers:  # the rank has no peers, so it is compared with its own past
        spans = (slow.first_step, slow.last_step), (0, slow.first_step - 1)
        now, before = (read(source, attempt, [slow.rank], *span) for span in spans)
        found = now, before
    if not all(found):
        return ""
    more_ms = found[0]["late"] - found[1]["late"]
    if more_ms >= SHARED.agreement_ratio * slow.excess_ms:
        return "host"
    return "device" if more_ms <= (1 - SHARED.agreement_ratio) * slow.excess_ms else ""


def _late_ms(
    source: Source, attempt: int, ranks: Sequence[int], first_step: int, last_step: int, *, typical: str
) -> dict[str, float]:
    """Return how long devices waited for their hosts per step (ms). `typical`: SQL aggregate, "avg" for a rank that
    pauses, else "median".
    """
    total = " + ".join(late(place) for place in (*OWN_PHASES, *GAPS))
    ((ms,),) = source.rows(
        f"SELECT {typical}({total}) / 1e6 FROM steps WHERE attempt = ? AND rank IN (SELECT unnest(?::INTEGER[])) "
        "AND step BETWEEN ? AND ? AND stamped_steps > 0",
        [attempt, list(ranks), first_step, last_step],
    )
    return {} if ms is None else {"late": float(ms)}


def is_late_as_peers(source: Source, attempt: int, slow: Straggler, peers: Sequence[int]) -> bool:
    """Return True if the peers' hosts take as long as the slow rank's late host."""
    if missing_tables(source, "nccl_calls"):
        return False
    read = partial(host_places_ms, typical="avg" if slow.paused_ratio else "median")
    own, usual = in_newest_steps(source, attempt, slow, peers, read)
    apart_ms = [own[place] - usual[place] for place in own if place in usual]
    more_ms = sum(max(0.0, ms) for ms in apart_ms)
    if not own or not usual or more_ms >= SHARED.explained_ratio * slow.excess_ms:
        return False
    now, most = _leads(source, attempt, slow, some_peers(peers, slow.rank))
    is_alike = sum(map(abs, apart_ms)) < SHARED.equal_ratio * slow.excess_ms
    return most >= 1 and (is_alike or now < SHARED.agreement_ratio * most)


def _leads(source: Source, attempt: int, slow: Straggler, ranks: Sequence[int]) -> tuple[float, float]:
    """Return two leads of hosts over their devices: the median for `ranks` in the newest slow steps, and the 0.9
    quantile for `ranks` and the slow rank in these and earlier steps. The unit is steps of the host, because a full
    launch queue limits the number of steps, however long they take."""
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
