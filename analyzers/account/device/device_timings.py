"""Own work and waiting of GPU ranks, by comparing the duration of each collective over its members.

    if has_device_calls(source, attempt=0):
        table = device_rows(source, attempt=0)      # rank, step, data, forward, ..., device, wait, duration; in ms

The host of a GPU does not wait for a collective. So the columns of `steps` hold waiting only if CUDA events timed the
phases on the device (`probes.device.phase_events`). Without such events, the kernels that NCCL's profiler plugin
recorded show the waiting. The kernel of a call starts on each member independently and spins until the last member has
entered:

1. Within one call, the last member to enter has the shortest kernel. The duration of this kernel is the transfer.
2. The wait of every other member is the duration of its kernel minus the transfer.
3. Calls of tensor, context, expert and pipeline parallelism block the rank, so their whole duration is waiting. A
   group's first call in a step blocks too if it is an all-gather (of parameters for the first computation). A pipeline
   send blocks only if it is the step's last, when nothing is left to compute. All other calls overlap computation and
   queue behind each other, so only the longest wait per group and step counts. A wait does not count if the last
   member's kernel had itself been queued: it started less than `SHARED.queued_ns` after the member's previous kernel
   of the group. The result is a lower bound; a profiled step gives the exact waiting.
4. The host enqueues whole steps ahead. On the device, a step lasts from the end of the previous step's last call to the
   end of its own last call. If the previous step has no calls, the host's duration is used.
5. A rank's own work is the step minus its waits. The time up to the end of a call is attributed to a phase if this call
   and the previous call were enqueued in that phase of the same step. Otherwise it counts as `device`.

Loading runs on the host while the device works on the previous step. Loading counts as own work only as far as it made
the rank slower than its peers; the rest is hidden.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from analyzers.account.time_classes import COMPUTE_PHASES
from analyzers.policy import SHARED
from analyzers.source import Source

__all__ = ["DEVICE", "device_rows"]

DEVICE = "device"
"""Name for own work in an unknown phase."""
_PLACES = (*COMPUTE_PHASES, DEVICE)


def device_rows(source: Source, attempt: int, *, since_step: int = 0) -> dict[str, npt.NDArray[Any]]:
    """One row per finished step and rank, ordered by rank and start."""
    phases = " + ".join(COMPUTE_PHASES)
    # A wait that overlaps earlier calls may be longer than the time attributed to its phase: the excess is subtracted
    # from `device`.
    in_phase = ", ".join(
        f"CASE WHEN has_bounds THEN greatest(coalesce(t.{phase}, 0) - coalesce(w.{phase}, 0), 0) / 1e6 ELSE 0 END "
        f"AS {phase}"
        for phase in COMPUTE_PHASES
    )
    shown = ", ".join(f"CAST(coalesce(scale, 0) * {phase} AS FLOAT) AS {phase}" for phase in COMPUTE_PHASES)
    return source.query(
        f"""
        WITH {_calls_sql()}, {_waits_sql()},
        -- The device's step from the previous step's last call to its own; unknown if that step has no calls.
        bounds AS (SELECT rank, step, sum(took) AS took, bool_and(is_next) AS has_bounds, {_by_place("took")}
                   FROM (SELECT rank, step, place, coalesce(step_before BETWEEN step - 1 AND step, false) AS is_next,
                                greatest(end_ns - before_ns, 0) AS took FROM calls)
                   GROUP BY rank, step),
        steps_ms AS (
            SELECT s.rank, s.step, s.start_ns, coalesce(s.data_ns, 0) / 1e6 AS loading,
                   CASE WHEN has_bounds THEN t.took ELSE s.duration_ns END / 1e6 AS duration,
                   least(coalesce(w.waited, 0), duration) AS wait, {in_phase}
            FROM steps s LEFT JOIN waits w USING (rank, step) LEFT JOIN bounds t USING (rank, step)
            WHERE s.attempt = ? AND s.step >= ? AND s.rank >= 0 AND s.duration_ns IS NOT NULL),
        peers AS (SELECT step, median(duration - wait) AS own, median(loading) AS loading FROM steps_ms GROUP BY step),
        split AS (
            SELECT o.*, least(greatest(o.loading - u.loading, 0), greatest(duration - wait - u.own, 0)) AS late_loading,
                   least(1.0, (duration - wait - late_loading) / nullif({phases}, 0)) AS scale
            FROM steps_ms o JOIN peers u USING (step))
        SELECT rank, step, CAST(late_loading AS FLOAT) AS data, {shown},
               CAST(duration - wait - late_loading - coalesce(scale, 0) * ({phases}) AS FLOAT) AS {DEVICE},
               CAST(wait AS FLOAT) AS wait, CAST(duration AS FLOAT) AS duration
        FROM split ORDER BY rank, start_ns
        """,
        [attempt, since_step, SHARED.queued_ns, SHARED.queued_ns, attempt, since_step],
    )


def _by_place(value: str) -> str:
    return ", ".join(f"sum({value}) FILTER (place = '{place}') AS {place}" for place in _PLACES)


def _calls_sql() -> str:
    """Relation `calls`: each call with its phase (`place`), the latest end of the rank's earlier calls (`before_ns`),
    and the time since the previous call of its group ended (`after_ns`)."""
    phases = ", ".join(f"'{phase}'" for phase in COMPUTE_PHASES)
    return f"""calls AS (
            SELECT rank, step, process_group, op, phase, issue_ns, end_ns, end_ns - issue_ns AS took,
                   issue_ns - lag(end_ns) OVER (PARTITION BY rank, process_group, op = 'send', peer ORDER BY issue_ns)
                       AS after_ns,
                   seq, CASE op WHEN 'send' THEN rank WHEN 'recv' THEN peer END AS sender,
                   CASE op WHEN 'send' THEN peer WHEN 'recv' THEN rank END AS receiver,
                   max(end_ns) OVER (in_order ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_ns,
                   lag(step) OVER in_order AS step_before,
                   CASE WHEN phase IN ({phases}) AND phase = lag(phase) OVER in_order
                             AND step = lag(step) OVER in_order THEN phase ELSE '{DEVICE}' END AS place
            FROM collectives WHERE attempt = ? AND step >= ? AND end_ns >= issue_ns AND rank >= 0
            WINDOW in_order AS (PARTITION BY rank ORDER BY issue_ns, end_ns))"""


def _waits_sql() -> str:
    """Relation `waits`: total waiting of each rank and step, and its parts by place. Concurrent waits count once."""
    return f"""waiting AS (SELECT rank, step, process_group, place, issue_ns AS start_ns, is_blocking,
                           issue_ns + took - CASE WHEN is_blocking THEN 0 ELSE shortest END AS end_ns
                 FROM (SELECT *, split_part(process_group, ':', 1)
                                     IN ('tp', 'cp', 'cp+tp', 'ep', 'ep+tp', 'pp')
                                 OR op = 'all_gather' AND issue_ns = min(issue_ns) OVER own_calls AS is_blocking,
                              min(took) OVER same_call AS shortest,
                              arg_min(after_ns, took) OVER same_call AS last_after_ns,
                              op = 'send' AND issue_ns < max(issue_ns) FILTER (op IN ('send', 'recv')) OVER own_calls
                                 AS is_background
                       FROM calls WINDOW own_calls AS (PARTITION BY rank, step, process_group),
                                    same_call AS (PARTITION BY process_group, seq, sender, receiver))
                 WHERE is_background IS DISTINCT FROM true AND (is_blocking OR coalesce(last_after_ns, ?) >= ?)),
        disjoint AS (SELECT rank, step, process_group, place, is_blocking,
                            greatest(0, end_ns - greatest(start_ns, coalesce(max(end_ns) OVER (
                                PARTITION BY rank, is_blocking ORDER BY start_ns, end_ns
                                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), start_ns))) AS waited
                     FROM waiting),
        counted AS (SELECT rank, step, place, sum(waited) AS waited FROM disjoint WHERE is_blocking
                    GROUP BY rank, step, place
                    UNION ALL SELECT rank, step, arg_max(place, waited), max(waited) FROM disjoint WHERE NOT is_blocking
                    GROUP BY rank, step, process_group),
        waits AS (SELECT rank, step, sum(waited) / 1e6 AS waited, {_by_place("waited")}
                  FROM counted GROUP BY rank, step)"""
