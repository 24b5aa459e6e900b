"""Decide whether the device or the host of a slow rank on a GPU delays its calls.

    late_side(source, timings, slow=straggler, peers=[0, 1, 2])     # "device", "host", or "" if unknown

With stamped steps, the side is decided by the part of the rank's excess in which its device waited for its host.
Without stamps, one call of each slow step is examined: the one before which the rank spent the most time. If the host
had launched it before the device's preceding work began, the device was late. If its kernel started as soon as it was
launched, the host was late. If the device worked after it had waited for its host, neither is the case. Then the host's
lead decides: a host that is a whole step ahead is not late, and a host that has lost such a lead is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from analyzers.account.time_classes import GAPS, OWN_PHASES, late
from analyzers.account.timings import Timings
from analyzers.policy import SHARED
from analyzers.source import Source, missing_tables
from analyzers.stragglers.comparison.corroboration import MAX_STEPS
from analyzers.stragglers.comparison.host_lead import leads
from analyzers.stragglers.comparison.newest_steps import in_newest_steps
from analyzers.stragglers.comparison.peer_comparison import Straggler

__all__ = ["late_side"]


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
    now, most = leads(source, attempt, slow, [slow.rank])
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
