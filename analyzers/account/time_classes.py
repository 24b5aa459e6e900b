"""Classes of step time as SQL over a row of `steps`. Only this module knows which columns make up which class.

    source.rows(f"SELECT rank, median({own('forward')}) / 1e6, median({WAITED}) / 1e6 FROM steps GROUP BY rank")

*Own work* is the time of a phase, or of a gap between phases, without waits. *Waiting* is the time in which the rank
was blocked in collectives and point-to-point calls. Time that no column accounts for was *not measured*: NULL, never 0.
Waits inside checkpoints and evaluations count as part of these. In steps that were timed on the device
(`stamped_steps`), all times are the GPU's, and the part of own work in which the GPU waited for its host is *late*. All
values are nanoseconds and never negative. `step_account` sums them up and makes them add up to the step.

DuckDB's `greatest` and `least` ignore NULL: `greatest(NULL, 0)` is 0. With `coalesce` instead, a query over a hundred
million rows takes 2.5 times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from probes.step_clock import GAPS, PHASES

__all__ = [
    "COMPUTE_PHASES", "GAPS", "GAPS_WORK", "NOT_MEASURED", "OWN_PHASES", "OWN_WORK", "PHASES", "TRAINING",
    "WAITED", "StepSums", "late", "own", "sums_sql", "total",
]  # fmt: skip

COMPUTE_PHASES = ("forward", "backward", "optimizer")
OWN_PHASES = ("data", *COMPUTE_PHASES)
"""Phases in which every rank does the same kind of work. One rank may evaluate or save for all."""
_WITH_WAIT = (*OWN_PHASES, *GAPS)
_IN_EVERY_STEP = ("checkpoint", "evaluate")
"""Phases that the host times in every step, with or without device timestamps."""


def _waited(place: str) -> str:
    """SQL of the time blocked in collectives in a phase or gap; 0 if not recorded."""
    return f"least(greatest({place}_wait_ns, 0), greatest({place}_ns, 0))"


def own(place: str) -> str:
    """SQL of the rank's own work in a phase or gap; NULL if not recorded."""
    return f"CASE WHEN {place}_ns IS NOT NULL THEN {_own_or_0(place)} END"


def _own_or_0(place: str) -> str:
    waited = f" - greatest({place}_wait_ns, 0)" if place in _WITH_WAIT else ""
    return f"greatest({place}_ns{waited}, 0)"


def total(places: Iterable[str]) -> str:
    """SQL of the own work in several phases and gaps, as far as recorded."""
    return _unless_unstamped(" + ".join(map(_own_or_0, places)))


def _unless_unstamped(sql: str) -> str:
    """Turn the SQL into NULL for a GPU step without timestamps if other steps have them, because such a step would look
    like one without work."""
    return f"CASE WHEN stamped_steps = 0 THEN NULL ELSE ({sql}) END"


def late(place: str) -> str:
    """SQL of the part of the own work in a phase or gap in which a GPU waited for its host; 0 without timestamps."""
    return f"least(greatest({place}_late_ns, 0), {_own_or_0(place)})" if place in _WITH_WAIT else "0"


_IN_PLACES = " + ".join(f"greatest({place}_ns, 0)" for place in (*PHASES, *GAPS))
_HAS_GAPS = f"{GAPS[0]}_ns IS NOT NULL"
_WAITED_IN_PHASES = "(" + " + ".join(_waited(phase) for phase in OWN_PHASES) + ")"
_WAITED_BEYOND = (  # if gaps were not recorded, all waits outside of phases count as waits between phases
    f"least(greatest(collective_wait_ns - {_WAITED_IN_PHASES}, 0), greatest(duration_ns - ({_IN_PLACES}), 0))"
)
_WAITED_IN_GAPS = f"CASE WHEN {_HAS_GAPS} THEN {' + '.join(_waited(gap) for gap in GAPS)} ELSE {_WAITED_BEYOND} END"
WAITED = _unless_unstamped(f"{_WAITED_IN_PHASES} + {_WAITED_IN_GAPS}")
OWN_WORK = f"nullif({total((*OWN_PHASES, *GAPS))}, 0)"
"""Own work of a step except checkpoints and evaluations; NULL if none was recorded."""
TRAINING = "greatest(duration_ns - coalesce(checkpoint_ns, 0) - coalesce(evaluate_ns, 0), 0)"
"""Step time without checkpoints and evaluations."""
GAPS_WORK = f"CASE WHEN {_HAS_GAPS} THEN {total(GAPS)} END"
"""Own work between phases; NULL if not recorded."""
NOT_MEASURED = f"greatest(duration_ns - {total((*PHASES, *GAPS))} - {WAITED}, 0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """Sums over the steps of one rank, in nanoseconds. Their total never exceeds the duration of the steps."""

    num_steps: int = 0
    duration_ns: int = 0
    own_ns: Mapping[str, int] = field(default_factory=dict)
    """Own work by phase and gap; a gap that was never measured is missing."""
    waited_in_phases_ns: int = 0
    waited_in_gaps_ns: int = 0
    late_ns: int = 0
    """Time in which a GPU waited for its host; not part of `own_ns`."""

    @classmethod
    def of_row(cls, values: Sequence[float | None]) -> StepSums:
        """Read the columns of `sums_sql`."""
        num_steps, duration, in_phases, in_gaps, late_ns, *spent = values
        return cls(
            num_steps=int(num_steps or 0),
            duration_ns=int(duration or 0),
            own_ns={name: int(ns) for name, ns in zip((*PHASES, *GAPS), spent, strict=True) if ns is not None},
            waited_in_phases_ns=int(in_phases or 0),
            waited_in_gaps_ns=int(in_gaps or 0),
            late_ns=int(late_ns or 0),
        )


def sums_sql(steps: str, group_by: str, *, more: Sequence[tuple[str, str]] = (), weight: str = "1") -> str:
    """Query over `steps`, a query of finished steps. The result has the columns `group_by`, `more` and the columns of
    `StepSums`.

    `more`: (min, max or count, column). `weight`: SQL of the number of steps that a row represents.

    1. If the columns of a step add up to more than its duration, they are scaled down to it (`fit`).
    2. Steps are summed separately with and without device timestamps (`stamp`).
    3. If a GPU has timestamps in every N-th step only, their sums are scaled up to the time of all steps (`scale`).
       Checkpoints and evaluations are not scaled, because every step records them.
    """
    lates = {place: late(place) for place in _WITH_WAIT}
    places = {place: f"{own(place)} - {late(place)}" if place in lates else own(place) for place in (*PHASES, *GAPS)}
    parts = {"in_phases": _WAITED_IN_PHASES, "in_gaps": _WAITED_IN_GAPS, "late": " + ".join(lates.values())} | places
    names = {part: f"c{number}" for number, part in enumerate(parts)}
    columns = ", ".join(f"({sql})::DOUBLE AS {names[part]}" for part, sql in parts.items())
    claimed = " + ".join(f"coalesce({name}, 0)" for name in names.values())
    sums = ", ".join(f"sum({name} * fit * {weight}) AS {name}" for name in names.values())
    in_every_step = " - ".join(f"coalesce({names[place]}, 0) * fit" for place in _IN_EVERY_STEP)
    extra = ", ".join(f"{function}({column}) AS m{number}" for number, (function, column) in enumerate(more))
    joined = "".join(
        f", {'sum' if function == 'count' else function}(m{number})" for number, (function, _) in enumerate(more)
    )
    scale = "CASE WHEN stamp = 1 THEN 1 + coalesce(left_out / nullif(stamped, 0), 0) ELSE 1 END"
    extended = ", ".join(
        f"sum({name})" if part in _IN_EVERY_STEP else f"sum({name} * scale)" for part, name in names.items()
    )
    return f"""
        SELECT {group_by}{joined}, sum(num), sum(took), {extended} FROM (
            SELECT *, {scale} AS scale FROM (
                SELECT *, sum(rest) FILTER (stamp = 0) OVER same AS left_out,
                       sum(rest) FILTER (stamp = 1) OVER same AS stamped FROM (
                    SELECT {group_by}, stamp{", " + extra if extra else ""}, sum({weight}) AS num,
                           sum((took - {in_every_step}) * {weight}) AS rest, sum(took * {weight}) AS took, {sums} FROM (
                        SELECT *, least(1.0, coalesce(took / nullif({claimed}, 0), 1.0)) AS fit FROM (
                            SELECT *, greatest(duration_ns, 0)::DOUBLE AS took, sign(stamped_steps) AS stamp, {columns}
                            FROM ({steps})))
                    GROUP BY {group_by}, stamp)
                WINDOW same AS (PARTITION BY {group_by})))
        GROUP BY {group_by} ORDER BY {group_by}"""
