"""Own work and waiting of ranks on GPUs, from the durations of their calls over all members.

    if has_device_calls(source, attempt=0):
        table = device_rows(source, attempt=0)      # rank, step, data, forward, ..., device, wait, duration; in ms

A GPU's host does not wait for a collective, so no column of a step says how long its rank waited, unless the step was
stamped on its device (`probes.device.phase_events`). What NCCL's profiler plugin recorded says it without stamps: the
kernel of a call starts on each member by itself and spins until the last has come, so

1. for the same call of the same group the shortest duration is the transfer, of the member that came last;
2. what a member's kernel took beyond that, its rank waited for the last one: it was that much earlier;
3. calls of tensor, context, expert and pipeline parallel are awaited at once, so all of their time was lost to
   communication. Who sends a message goes on, but for the last one of a step: at the end of its schedule a pipeline
   waits for its sends, and nothing is left to compute meanwhile. So is a step's first all-gather of a group awaited: no
   computing could go on without its parameters. Other calls overlap computing, and queue: of each group only the
   longest wait of a step counts, and none for a member whose kernel was queued, too. So this is the *least* that a
   rank waited; a profiled step says exactly;
4. a step lasts on the device from the end of the last call of the step before to the end of its last call: the host
   runs ahead by steps, and its times say when it enqueued. Where the step before has no calls, the host's time stands;
5. a rank's own work in a step is the step without the waits. The time up to a call's end lies in a phase where the call
   and the one before it were enqueued in that phase of the same step; elsewhere the place is not known (`device`).

Loading runs on the host, while the device works on the step before. It is own time of the rank only as far as the rank
took longer than its peers because of it; the rest is hidden.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from analyzers.account.time_classes import COMPUTE_PHASES
from analyzers.policy import SHARED
from analyzers.source import Source, lacking, missing_tables

__all__ = ["DEVICE", "device_rows", "has_device_calls", "is_stamped"]

DEVICE = "device"
"""Place of own work whose phase is not known."""
_PLACES = (*COMPUTE_PHASES, DEVICE)
_SHOWN = tuple(f"CAST(coalesce(fit, 0) * {phase} AS FLOAT) AS {phase}" for phase in COMPUTE_PHASES)


def is_stamped(source: Source, attempt: int) -> bool:
    """Return True if steps of the attempt have the times of their devices."""
    if lacking(source, steps=("stamped_steps",)):
        return False
    return bool(source.rows("SELECT 1 FROM steps WHERE attempt = ? AND stamped_steps > 0 LIMIT 1", [attempt]))


def has_device_calls(source: Source, attempt: int) -> bool:
    """Return True if calls of the attempt were timed on devices, and no stamps or hosts measured waits in them."""
    if missing_tables(source, "nccl_groups", "collectives") or is_stamped(source, attempt):
        return False
    timed = "SELECT 1 FROM collectives WHERE attempt = ? AND wait_ns IS {} AND end_ns IS NOT NULL AND step IS NOT NULL"
    has = [bool(source.rows(f"{timed.format(null)} LIMIT 1", [attempt])) for null in ("NULL", "NOT NULL")]
    return has == [True, False]


def device_rows(source: Source, attempt: int, *, since_step: int = 0) -> dict[str, npt.NDArray[Any]]:
    """One row a finished step and rank, by rank and start."""
    known = ", ".join(f"'{phase}'" for phase in COMPUTE_PHASES)
    took = ", ".join(f"sum(took) FILTER (place = '{place}') AS {place}" for place in _PLACES)
    waited = ", ".join(f"sum(waited) FILTER (place = '{place}') AS {place}" for place in _PLACES)
    # A wait that overlaps the calls before it may be longer than the time up to its call: the rest is elsewhere.
    in_phase = {
        phase: f"CASE WHEN has_bounds "
        f"THEN greatest(coalesce(t.{phase}, 0) - coalesce(w.{phase}, 0), 0) / 1e6 ELSE 0 END"
        for phase in COMPUTE_PHASES
    }
    return source.query(
        f"""
        WITH calls AS (
            SELECT rank, step, process_group, op, phase, issue_ns, end_ns, end_ns - issue_ns AS took,
                   issue_ns - lag(end_ns) OVER (PARTITION BY rank, process_group, op = 'send', peer ORDER BY issue_ns)
                       AS after_ns,
                   seq, CASE op WHEN 'send' THEN rank WHEN 'recv' THEN peer END AS sender,
                   CASE op WHEN 'send' THEN peer WHEN 'recv' THEN rank END AS receiver,
                   max(end_ns) OVER (in_order ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_ns,
                   lag(step) OVER in_order AS step_before,
                   CASE WHEN phase IN ({known}) AND phase = lag(phase) OVER in_order
                             AND step = lag(step) OVER in_order THEN phase ELSE '{DEVICE}' END AS place
            FROM collectives WHERE attempt = ? AND step >= ? AND end_ns >= issue_ns AND rank >= 0
            WINDOW in_order AS (PARTITION BY rank ORDER BY issue_ns, end_ns)),
        late AS (SELECT rank, step, process_group, place, issue_ns AS begin_ns, is_awaited,
                        issue_ns + took - CASE WHEN is_awaited THEN 0 ELSE shortest END AS end_ns
                 FROM (SELECT *, split_part(process_group, ':', 1)
                                     IN ('tp', 'cp', 'cp+tp', 'ep', 'ep+tp', 'pp')
                                 OR op = 'all_gather' AND issue_ns = min(issue_ns) OVER own_calls AS is_awaited,
                              min(took) OVER same_call AS shortest,
                              arg_min(after_ns, took) OVER same_call AS last_after_ns,
                              op = 'send' AND issue_ns < max(issue_ns) FILTER (op IN ('send', 'recv')) OVER own_calls
                                 AS goes_on
                       FROM calls WINDOW own_calls AS (PARTITION BY rank, step, process_group),
                                    same_call AS (PARTITION BY process_group, seq, sender, receiver))
                 WHERE goes_on IS DISTINCT FROM true AND (is_awaited OR coalesce(last_after_ns, ?) >= ?)),
        apart AS (SELECT rank, step, process_group, place, is_awaited,
                         greatest(0, end_ns - greatest(begin_ns, coalesce(max(end_ns) OVER (
                             PARTITION BY rank, is_awaited ORDER BY begin_ns, end_ns
                             ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_ns))) AS waited
                  FROM late),
        longest AS (SELECT rank, step, place, sum(waited) AS waited FROM apart WHERE is_awaited
                    GROUP BY rank, step, place
                    UNION ALL SELECT rank, step, arg_max(place, waited), max(waited) FROM apart WHERE NOT is_awaited
                    GROUP BY rank, step, process_group),
        waits AS (SELECT rank, step, sum(waited) / 1e6 AS waited, {waited} FROM longest GROUP BY rank, step),
        bounds AS (SELECT rank, step, sum(took) AS took, bool_and(is_next) AS has_bounds, {took}
                   FROM (SELECT rank, step, place, coalesce(step_before BETWEEN step - 1 AND step, false) AS is_next,
                                greatest(end_ns - before_ns, 0) AS took FROM calls)
                   GROUP BY rank, step),
        own AS (
            SELECT s.rank, s.step, s.start_ns, coalesce(s.data_ns, 0) / 1e6 AS loading,
                   CASE WHEN has_bounds THEN t.took ELSE s.duration_ns END / 1e6 AS duration,
                   least(coalesce(w.waited, 0), duration) AS wait,
                   {", ".join(f"{sql} AS {phase}" for phase, sql in in_phase.items())}
            FROM steps s LEFT JOIN waits w USING (rank, step) LEFT JOIN bounds t USING (rank, step)
            WHERE s.attempt = ? AND s.step >= ? AND s.rank >= 0 AND s.duration_ns IS NOT NULL),
        usual AS (SELECT step, median(duration - wait) AS own, median(loading) AS loading FROM own GROUP BY step),
        parted AS (
            SELECT o.*, least(greatest(o.loading - u.loading, 0), greatest(duration - wait - u.own, 0)) AS beyond,
                   least(1.0, (duration - wait - beyond) / nullif({" + ".join(COMPUTE_PHASES)}, 0)) AS fit
            FROM own o JOIN usual u USING (step))
        SELECT rank, step, CAST(beyond AS FLOAT) AS data, {", ".join(_SHOWN)},
               CAST(duration - wait - beyond - coalesce(fit, 0) * ({" + ".join(COMPUTE_PHASES)}) AS FLOAT) AS {DEVICE},
               CAST(wait AS FLOAT) AS wait, CAST(duration AS FLOAT) AS duration
        FROM parted ORDER BY rank, start_ns
        """,
        [attempt, since_step, SHARED.queued_ns, SHARED.queued_ns, attempt, since_step],
    )
