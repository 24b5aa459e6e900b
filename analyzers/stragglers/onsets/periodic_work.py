"""Steps of a recorded run that are slow at regular intervals: what takes the time in them, and on which ranks.

    findings = throughput(store, Scope())       # kind throughput: a lasting drop, else cause periodic

1. The interval is that of `periodic_steps`, for step times without checkpoints and evaluations. No random order of the
   same steps may be as regular: on a busy machine, many steps are slow at any time.
2. The slow steps are compared with the other steps of the same rank. Ranks whose own work explains half of the
   difference are the cause, in the place that holds most of it. If no rank's work does, but all ranks wait longer,
   transfers are slow.
3. Longer batches explain longer steps. A single rank that pauses often is a straggler (`pauses`), and ranks that wait
   for data are found by `data_bound`. None of these is reported here.
4. It is only advice if the slow steps save or evaluate, or if the time is between the phases: there a loop logs, saves
   or evaluates on purpose. So are waits for a core that no extra work explains: a scheduler that shares a core in turns
   interrupts every k-th of short steps.

The host of a GPU without stamps runs ahead of it and is stopped in any step, so such steps are not judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from analyzers.account.device.measured_by import is_on_device, is_stamped
from analyzers.account.time_classes import COMPUTE_PHASES, GAPS, TRAINING, WAITED, own
from analyzers.data.analyze import data_bound
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.calls.snapshot import attempts
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from analyzers.source import READ_ROWS, Floats, Ints, Source, floats, ints, missing_tables
from analyzers.stragglers.onsets.periodic_steps import Rhythm, find_rhythm, rhythm_finding
from analyzers.stragglers.policy import PausePolicy, PeriodicPolicy
from analyzers.stragglers.slow_place import PLACE_TEXTS
from analyzers.stragglers.throughput import throughput_drops
from analyzers.wording import number, ranks_text
from probes.tape import event_kinds

__all__ = ["throughput"]

MAX_STEPS = 400
"""Maximum number of slow and of other steps that are compared."""
_PLACES = ("data", *COMPUTE_PHASES, *GAPS)
_WHERE = PLACE_TEXTS | {"data": " in data loading"}


def throughput(source: Source, scope: Scope) -> list[Finding]:
    """Report a lasting drop of each attempt; if none has one, the slow steps at regular intervals of the newest."""
    return throughput_drops(source, scope) or _periodic(source, scope)


def _periodic(source: Source, scope: Scope) -> list[Finding]:
    if missing_tables(source, "steps"):
        return []
    attempt = max((one for one in attempts(source) if scope.attempt in (None, one)), default=None)
    if attempt is None or (is_on_device(source, attempt) and not is_stamped(source, attempt)):
        return []
    ((num_rows,),) = source.rows("SELECT count(*) FROM steps WHERE attempt = ?", [attempt])
    table = source.query(
        f"""
        SELECT step, median({TRAINING}) / 1e6 AS took FROM steps
        WHERE attempt = ? AND rank >= 0 AND step >= ? AND duration_ns IS NOT NULL AND coalesce(committed, true)
          AND coalesce(stamped_steps, 1) > 0 AND rank % ? = 0
        GROUP BY step ORDER BY step
        """,
        [attempt, scope.since_step, max(1, -(-num_rows // READ_ROWS))],
    )
    step = ints(table["step"])[SHARED.warm_up_steps :]
    took_ms = floats(table["took"])[SHARED.warm_up_steps :]
    tried = (find_rhythm(step, took_ms, PeriodicPolicy(), typical=typical) for typical in (False, True))
    rhythm = next((one for one in tried if one is not None and one.chance_ratio == 0), None)
    if rhythm is None:
        return []
    parts = _compared(source, attempt, step, rhythm)
    if parts is None or _is_found_elsewhere(source, attempt, rhythm, parts):
        return []
    return [_finding(attempt, rhythm, parts, saves=_saves(source, attempt, step, rhythm))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Slow steps minus other steps, medians of a rank; of all ranks, or of those whose own work explains it."""

    ranks: tuple[int, ...]
    """Empty for all ranks."""
    place: str
    """Phase or gap; `communication`; empty if no place holds most of the excess."""
    excess_ms: float
    collecting_ms: float
    core_wait_ms: float
    """Waits for a core, if they explain the excess and more CPU time does not; else 0."""
    tokens_ratio: float
    """Tokens of a slow step / tokens of another one."""


def _compared(source: Source, attempt: int, step: Ints, rhythm: Rhythm) -> _Parts | None:
    others = np.setdiff1d(step, rhythm.slow_steps)
    chosen = [steps[:: -(-len(steps) // MAX_STEPS)] for steps in (rhythm.slow_steps, others)]
    columns = {f"own_{place}": f"coalesce({own(place)}, 0)" for place in _PLACES}
    columns |= {"waited": WAITED, "collecting": "coalesce(gc_ns, 0)"}
    columns |= {"core_wait": "coalesce(run_delay_ns, 0)", "cpu": "coalesce(cpu_ns, 0)"}
    medians = ", ".join(f"median({sql}) / 1e6 AS {name}" for name, sql in columns.items())
    table = source.query(
        f"""
        SELECT rank, list_contains(?::BIGINT[], step) AS is_slow, {medians},
               coalesce(median(tokens), 0)::DOUBLE AS tokens
        FROM steps WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL AND coalesce(stamped_steps, 1) > 0
          AND list_contains(?::BIGINT[], step)
        GROUP BY rank, is_slow QUALIFY count(*) OVER (PARTITION BY rank) = 2 ORDER BY is_slow, rank
        """,
        [chosen[0].tolist(), attempt, np.concatenate(chosen).tolist()],
    )
    num = len(table["rank"]) // 2
    if not num:
        return None
    rise = {name: floats(table[name])[num:] - floats(table[name])[:num] for name in columns}
    usual, slow = (float(np.median(floats(table["tokens"])[part])) for part in (slice(num), slice(num, None)))
    least_ms = SHARED.explained_ratio * (rhythm.slow_ms - rhythm.usual_ms)
    own_ms = np.sum([rise[f"own_{place}"] for place in _PLACES], axis=0)
    causing = np.flatnonzero(own_ms >= least_ms)
    place, ranks, excess_ms = "", tuple(ints(table["rank"])[causing].tolist()), rhythm.slow_ms - rhythm.usual_ms
    if len(causing):
        excess_ms = float(np.median(own_ms[causing]))
        by_place = {one: float(np.median(rise[f"own_{one}"][causing])) for one in _PLACES}
        most = max(by_place, key=by_place.__getitem__)
        place = most if by_place[most] >= SHARED.agreement_ratio * excess_ms else ""
    elif rise["waited"].min() >= least_ms:
        place = "communication"
    core_wait_ms = 0.0
    if place != "communication":  # if no rank causes it, the waits may be in another place of each step
        judged = causing if len(causing) else np.arange(num)
        core_wait_ms = _core_wait_ms(source, attempt, rise["core_wait"][judged], rise["cpu"][judged], least_ms)
    return _Parts(
        ranks=() if len(ranks) >= SHARED.agreement_ratio * num else ranks, place=place, excess_ms=excess_ms,
        collecting_ms=float(np.median(rise["collecting"][causing])) if len(causing) else 0.0,
        core_wait_ms=core_wait_ms,
        tokens_ratio=slow / usual if usual else 1.0,
    )  # fmt: skip


def _core_wait_ms(source: Source, attempt: int, waits_ms: Floats, cpu_ms: Floats, least_ms: float) -> float:
    """The extra wait for a core per step; 0 unless it explains the excess. More work waits longer
    for a core, too: by the ratio of waits to CPU time in all steps.
    """
    if (wait_ms := float(np.median(waits_ms))) < least_ms:
        return 0.0
    ((ratio,),) = source.rows(
        "SELECT sum(run_delay_ns) / nullif(sum(cpu_ns), 0) FROM steps WHERE attempt = ? AND rank >= 0", [attempt]
    )
    return wait_ms if float(np.median(cpu_ms)) * (1 + (ratio or 0.0)) < least_ms else 0.0


def _is_found_elsewhere(source: Source, attempt: int, rhythm: Rhythm, parts: _Parts) -> bool:
    """Return True if longer batches explain the steps, or another analysis reports them."""
    if rhythm.slow_ms <= (1 + SHARED.equal_ratio) * parts.tokens_ratio * rhythm.usual_ms:
        return True
    if len(parts.ranks) == 1 and rhythm.every_steps * PausePolicy().min_share_ratio <= 1:
        return True
    is_data = parts.place == "data" and not parts.ranks
    return is_data and any(one.status == "fired" for one in data_bound(source, Scope(attempt=attempt)))


def _saves(source: Source, attempt: int, step: Ints, rhythm: Rhythm) -> bool:
    """Return True if the slow steps save or evaluate, or follow such a step, and the others mostly don't."""
    queries = [
        (table, sql)
        for table, sql in (
            ("steps", "SELECT DISTINCT step FROM steps WHERE attempt = ? AND (checkpoint_ns > 0 OR evaluate_ns > 0)"),
            ("spans", "SELECT DISTINCT step FROM spans WHERE attempt = ? AND kind IN ('checkpoint', 'evaluate')"),
            ("checkpoints", "SELECT DISTINCT step FROM checkpoints WHERE attempt = ?"),
        )
        if source.has(table)
    ]
    found = {at for _, sql in queries for (at,) in source.rows(sql, [attempt])}
    events = EventLog.load(source, (event_kinds.EVALUATION,))
    found |= {event.step for event in events.of(event_kinds.EVALUATION, attempt=attempt)}
    known = np.array([at + later for at in found if at is not None for later in (0, 1)], dtype=np.int64)
    is_slow, is_known = np.isin(step, rhythm.slow_steps), np.isin(step, known)
    return bool(is_known[is_slow].mean() >= SHARED.agreement_ratio and is_known[~is_slow].mean() <= SHARED.minor_ratio)


def _finding(attempt: int, rhythm: Rhythm, parts: _Parts, *, saves: bool) -> Finding:
    is_collecting = parts.collecting_ms >= SHARED.explained_ratio * parts.excess_ms
    who = f"{ranks_text(parts.ranks)[0].upper()}{ranks_text(parts.ranks)[1:]}" if parts.ranks else "All ranks"
    spent = f"spend{'s' if len(parts.ranks) == 1 else ''} {number(parts.excess_ms)} ms more"
    if parts.core_wait_ms:
        why = f"{who} {spent}, mostly waiting for a core."
    elif is_collecting:
        why = f"{who} {spent}, mostly in Python's garbage collector."
    elif parts.place == "communication":
        why = f"{who} wait {number(parts.excess_ms)} ms longer in communication."
    else:
        why = f"{who} {spent}{_WHERE.get(parts.place, '')}."
    if saves:
        why += " These steps save or evaluate, or come right after."
    found = rhythm_finding(rhythm)
    is_duty = saves or bool(parts.core_wait_ms) or (parts.place in GAPS and not is_collecting)
    return replace(
        found,
        status="advice" if is_duty else "fired",
        severity="info" if is_duty else found.severity,
        ranks=parts.ranks,
        summary=f"{found.summary} {why}",
        evidence={
            **found.evidence, "place": parts.place,
            **({"gc_excess_ms": round(parts.collecting_ms, 3)} if is_collecting else {}),
            **({"core_wait_excess_ms": round(parts.core_wait_ms, 3)} if parts.core_wait_ms else {}),
        },
        attempt=attempt,
    )  # fmt: skip
