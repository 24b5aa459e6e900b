"""Find the phase, gap or source line in which a slow rank spends its excess, and describe it.

    named_phase(source, attempt=0, slow=straggler, peers=[0, 1, 2])      # "reward", or ""
    host_place(source, attempt=0, slow=straggler, peers=[0, 1, 2])       # ("after_optimizer", 30.0), or ("", 0.0)
    evidence |= slow_line(log, attempt=0, rank=1)      # {"line": "train.py:57 step", "line_share_ratio": 0.85, ...}

1. The step's columns cover forward, backward and optimizer. Sampling or scoring completions falls into a gap between
   these phases, and spans show which named phase it is. Of two nested spans the shorter one is more specific.
2. On a GPU, calls show that a rank is slow, but not where. Spans show the host's phases and gaps: a host that sleeps or
   computes there makes its device late. But a loop that reads a value back also waits there for its device, and
   longer if the device is slow. A place in which the peers also spend time is therefore not named.
3. While a straggler is open, `watch` samples stacks; the most frequent line is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from analyzers.account.device.measured_by import is_stamped
from analyzers.account.named_phases import KNOWN_KINDS, phase_name
from analyzers.account.time_classes import COMPUTE_PHASES
from analyzers.policy import SHARED
from analyzers.run.calls.recorded_calls import MAX_NAME, P2P
from analyzers.run.records.event_log import EventLog
from analyzers.run.records.newest_steps import NEWEST_STEPS
from analyzers.source import Source
from analyzers.stragglers.comparison.peer_comparison import Straggler
from probes.step_clock import GAPS, PHASE_COLUMNS
from probes.tape import event_kinds
from probes.tape.format.schema import TABLES

__all__ = [
    "PLACE_TEXTS", "host_place", "host_places_by_step", "host_places_ms", "in_newest_steps", "named_phase",
    "phase_text", "slow_line",
]  # fmt: skip

Read = Callable[[Source, int, Sequence[int], int, int], dict[str, float]]
_NAMES = [column.name.removesuffix("_ns") for column in TABLES["steps"].columns]
_GAP_BEFORE = {kind: _NAMES[columns.gap] for kind, columns in PHASE_COLUMNS.items()}
_PLACES = (*COMPUTE_PHASES, *GAPS)

PLACE_TEXTS = {
    "forward": " in forward", "backward": " in backward", "optimizer": " in the optimizer",
    "before_forward": " before the forward pass", "forward_to_backward": " between forward and backward",
    "backward_to_optimizer": " between backward and the optimizer", "after_optimizer": " after the optimizer",
}  # fmt: skip


def named_phase(source: Source, attempt: int, slow: Straggler, peers: Sequence[int]) -> str:
    """Return the phase that holds a slow rank's excess over the mean of its peers; empty if none does."""
    own, usual = in_newest_steps(source, attempt, slow, peers, _mean_ms)
    least_ms = SHARED.agreement_ratio * slow.excess_ms
    holding = [name for name in own if own[name] - usual.get(name, 0.0) >= least_ms]
    return phase_name(min(holding, key=lambda name: own[name], default=""))


def _mean_ms(source: Source, attempt: int, ranks: Sequence[int], first_step: int, last_step: int) -> dict[str, float]:
    """{name: own time per step and rank}; a phase that is not in every step is averaged over all steps."""
    where = "attempt = ? AND rank IN (SELECT unnest(?::INTEGER[])) AND step BETWEEN ? AND ?"
    scope = [attempt, list(ranks), first_step, last_step]
    known = ", ".join(f"'{kind}'" for kind in KNOWN_KINDS)
    ((num_steps,),) = source.rows(
        f"SELECT count(DISTINCT (rank, step)) FROM steps WHERE {where} AND duration_ns IS NOT NULL", scope
    )
    rows = source.rows(
        f"SELECT kind, sum(greatest(end_ns - start_ns - coalesce(wait_ns, 0), 0))::DOUBLE / 1e6 FROM spans "
        f"WHERE {where} AND end_ns IS NOT NULL AND kind NOT IN ({known}) GROUP BY kind ORDER BY kind",
        scope,
    )
    return {str(kind): ms / num_steps for kind, ms in rows} if num_steps else {}


def slow_line(log: EventLog, attempt: int, rank: int) -> dict[str, Any]:
    """Evidence from the newest `slow_line` event of a rank; empty if it was not sampled."""
    found = [one for one in log.of(event_kinds.SLOW_LINE, attempt=attempt) if one.integer("slow_rank") == rank]
    if not found or not found[-1].text("line"):
        return {}
    newest = found[-1]
    return {
        "line": newest.text("line")[:300],
        "line_share_ratio": newest.detail.get("share_ratio"),
        "line_share_of_peer_ratio": newest.detail.get("peer_share_ratio"),
        "num_stack_samples": newest.integer("num_samples"),
    }


def in_newest_steps(
    source: Source, attempt: int, slow: Straggler, peers: Sequence[int], read: Read
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the results of `read(source, attempt, ranks, first_step, last_step)` for the rank and for its peers in its
    newest slow steps; both are empty without peers or without spans."""
    others = [rank for rank in peers if rank != slow.rank]
    if not (slow.has_peers and slow.cause == "compute" and others and source.has("spans")):
        return {}, {}
    first = max(slow.first_step, slow.last_step - NEWEST_STEPS)
    own, usual = (read(source, attempt, ranks, first, slow.last_step) for ranks in ([slow.rank], others))
    return own, usual


def host_place(
    source: Source, attempt: int, slow: Straggler, peers: Sequence[int], *, place: str = ""
) -> tuple[str, float]:
    """Return the phase or gap in which the host of a slow rank spends the excess, and how much longer (ms) it takes
    there. The result is ("", 0.0) if there is no such place, or if a device may be the cause. `place`: consider only
    this one."""
    read = partial(host_places_ms, typical="avg" if slow.paused_ratio else "median")
    own, usual = in_newest_steps(source, attempt, slow, peers, read)
    excess = {name: own[name] - usual[name] for name in own if name in usual and place in ("", name)}
    if not excess:
        return "", 0.0
    name, longer_ms = max(excess.items(), key=lambda one: one[1])
    is_enough = longer_ms >= SHARED.agreement_ratio * slow.excess_ms
    return (name, longer_ms) if is_enough and usual[name] <= (1 - SHARED.agreement_ratio) * longer_ms else ("", 0.0)


def host_places_ms(
    source: Source, attempt: int, ranks: Sequence[int], first_step: int, last_step: int, *, typical: str = "median"
) -> dict[str, float]:
    """Typical time per step in each phase, and in each gap between the spans of phases and transfers."""
    typical_ms = ", ".join(f"CAST({typical}({place}) AS DOUBLE)" for place in _PLACES)
    rows = source.rows(
        f"{_places_sql(source, attempt)} SELECT {typical_ms} FROM sums",
        [attempt, list(ranks), first_step, last_step, attempt],
    )
    return {place: ms for place, ms in zip(_PLACES, rows[0], strict=True) if ms is not None}


def host_places_by_step(
    source: Source, attempt: int, ranks: Sequence[int], first_step: int, last_step: int, place: str
) -> dict[int, dict[int, float]]:
    """{step: {rank: time that the rank's host spends in a phase or gap}}, in ms."""
    rows = source.rows(
        f"{_places_sql(source, attempt)} SELECT step, rank, CAST({place} AS DOUBLE) FROM sums",
        [attempt, list(ranks), first_step, last_step, attempt],
    )
    found: dict[int, dict[int, float]] = {}
    for step, rank, ms in rows:
        found.setdefault(int(step), {})[int(rank)] = float(ms)
    return found


def _places_sql(source: Source, attempt: int) -> str:
    """Relation `sums`: phases and gaps of each rank and step. A gap is named after the phase that follows it, as in the
    step clock. A stamped step has the duration that was measured on its device. On the host, such a step ends where the
    next one begins."""
    finish = "start_ns + duration_ns"
    if is_stamped(source, attempt):
        has_next = "stamped_steps > 0 AND lead(step) OVER in_order = step + 1"
        finish = f"CASE WHEN {has_next} THEN lead(start_ns) OVER in_order ELSE {finish} END"
    names = "CASE kind " + " ".join(f"WHEN '{kind}' THEN '{gap}'" for kind, gap in _GAP_BEFORE.items()) + " END"
    known = ", ".join(f"'{kind}'" for kind in (*_GAP_BEFORE, *P2P))
    parts = [f"sum(end_ns - start_ns) FILTER (kind = '{phase}')" for phase in COMPUTE_PHASES]
    parts += [f"sum(took) FILTER (gap = '{gap}')" for gap in GAPS]
    sums = ", ".join(f"coalesce({part}, 0) / 1e6 AS {place}" for part, place in zip(parts, _PLACES, strict=True))
    return f"""
        WITH bounds AS (
            SELECT rank, step, start_ns AS begin_ns, {finish} AS finish_ns FROM steps
            WHERE attempt = ? AND rank IN (SELECT unnest(?::INTEGER[])) AND step BETWEEN ? AND ?
                  AND duration_ns IS NOT NULL
            WINDOW in_order AS (PARTITION BY rank ORDER BY start_ns)
            QUALIFY row_number() OVER (PARTITION BY rank, step ORDER BY start_ns DESC) = 1),
        of_phases AS (
            SELECT rank, step, begin_ns, finish_ns, kind, s.start_ns, s.end_ns, {names} AS gap
            FROM spans s JOIN bounds USING (rank, step)
            WHERE s.attempt = ? AND s.start_ns >= begin_ns AND s.end_ns IS NOT NULL AND s.kind IN ({known})),
        parts AS (
            SELECT rank, step, begin_ns, kind, start_ns, end_ns, gap FROM of_phases
            UNION ALL
            SELECT rank, step, begin_ns, '', finish_ns, finish_ns, 'after_optimizer' FROM (
                SELECT rank, step, begin_ns, greatest(any_value(finish_ns), max(end_ns)) AS finish_ns FROM of_phases
                GROUP BY rank, step, begin_ns)),
        gaps AS (
            SELECT rank, step, kind, start_ns, end_ns,
                   greatest(0, start_ns - coalesce(max(end_ns) OVER former, begin_ns)) AS took,
                   first_value(gap IGNORE NULLS) OVER (PARTITION BY rank, step ORDER BY start_ns, end_ns
                       ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS gap,
                   count(*) OVER (PARTITION BY rank, step) AS num_parts
            FROM parts WINDOW former AS (PARTITION BY rank, step ORDER BY start_ns, end_ns
                                         ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)),
        sums AS (SELECT rank, step, {sums} FROM gaps WHERE num_parts > 1 GROUP BY rank, step)"""


def phase_text(name: str) -> str:
    """Describe a phase that the loop named itself."""
    return f" in its phase {name[:MAX_NAME]}"
