"""Classes of a step's time as SQL over a row of `steps`: the one place that knows which columns make up which class.

    source.rows(f"SELECT rank, median({own('forward')}) / 1e6, median({WAITED}) / 1e6 FROM steps GROUP BY rank")

*Own work* is a phase or a gap between phases without its waits, *waiting* is what the rank was blocked for in
collectives and messages, and what no column accounts for was *not measured*: NULL, never 0. Waits inside checkpoints
and evaluations belong to those. All in nanoseconds, none negative. `step_account` sums them and makes them add up.

`greatest` and `least` of DuckDB pass over NULL: `greatest(NULL, 0)` is 0. Over a hundred million rows an expression
with a `coalesce` in each place takes 2.5 times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from probes.step_clock import GAPS, PHASES

__all__ = [
    "COMPUTE_PHASES", "GAPS", "GAPS_WORK", "NOT_MEASURED", "OWN_PHASES", "OWN_WORK", "PHASES", "TRAINING",
    "WAITED", "StepSums", "own", "sums_sql", "total",
]  # fmt: skip

COMPUTE_PHASES = ("forward", "backward", "optimizer")
OWN_PHASES = ("data", *COMPUTE_PHASES)
"""Phases in which every rank does the same kind of work. One rank may evaluate or save for all."""
_WITH_WAIT = (*OWN_PHASES, *GAPS)


def _waited(place: str) -> str:
    """Part of a phase or gap blocked in collectives; 0 where none was recorded."""
    return f"least(greatest({place}_wait_ns, 0), greatest({place}_ns, 0))"


def own(place: str) -> str:
    """SQL of the rank's own work in a phase or gap; NULL where it was not recorded."""
    return f"CASE WHEN {place}_ns IS NOT NULL THEN {_own_or_0(place)} END"


def _own_or_0(place: str) -> str:
    waited = f" - greatest({place}_wait_ns, 0)" if place in _WITH_WAIT else ""
    return f"greatest({place}_ns{waited}, 0)"


def total(places: Iterable[str]) -> str:
    """SQL of the own work of several phases and gaps; of those that were recorded."""
    return "(" + " + ".join(map(_own_or_0, places)) + ")"


_IN_PLACES = " + ".join(f"greatest({place}_ns, 0)" for place in (*PHASES, *GAPS))
_HAS_GAPS = f"{GAPS[0]}_ns IS NOT NULL"
_WAITED_IN_PHASES = "(" + " + ".join(_waited(phase) for phase in OWN_PHASES) + ")"
_BEYOND = (  # without gaps, whatever the step waited beyond its phases was between them
    f"least(greatest(collective_wait_ns - {_WAITED_IN_PHASES}, 0), greatest(duration_ns - ({_IN_PLACES}), 0))"
)
_WAITED_IN_GAPS = f"CASE WHEN {_HAS_GAPS} THEN {' + '.join(_waited(gap) for gap in GAPS)} ELSE {_BEYOND} END"
WAITED = f"({_WAITED_IN_PHASES} + {_WAITED_IN_GAPS})"
OWN_WORK = f"nullif({total((*OWN_PHASES, *GAPS))}, 0)"
"""Own work of a step but for checkpoints and evaluations; NULL where nothing of it was recorded."""
TRAINING = "greatest(duration_ns - coalesce(checkpoint_ns, 0) - coalesce(evaluate_ns, 0), 0)"
"""The step without checkpoints and evaluations."""
GAPS_WORK = f"CASE WHEN {_HAS_GAPS} THEN {total(GAPS)} END"
"""Own work between phases; NULL where it was not recorded."""
NOT_MEASURED = f"greatest(duration_ns - {total((*PHASES, *GAPS))} - {WAITED}, 0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """Sums of the columns over some steps of a rank, nanoseconds: never longer than the steps."""

    num_steps: int = 0
    duration_ns: int = 0
    own_ns: Mapping[str, int] = field(default_factory=dict)
    """By phase and gap; a gap that was never measured is not in it."""
    waited_in_phases_ns: int = 0
    waited_in_gaps_ns: int = 0

    @classmethod
    def of_row(cls, values: Sequence[float | None]) -> StepSums:
        """Read the columns of `sums_sql`."""
        num_steps, duration, in_phases, in_gaps, *spent = values
        return cls(
            num_steps=int(num_steps or 0),
            duration_ns=int(duration or 0),
            own_ns={name: int(ns) for name, ns in zip((*PHASES, *GAPS), spent, strict=True) if ns is not None},
            waited_in_phases_ns=int(in_phases or 0),
            waited_in_gaps_ns=int(in_gaps or 0),
        )


def sums_sql(steps: str, group_by: str, *, more: str = "", weight: str = "1") -> str:
    """Query of the sums of `StepSums`, behind the columns `group_by` and `more`, over finished rows of `steps`."""
    places = {place: own(place) for place in (*PHASES, *GAPS)}
    parts = {"in_phases": _WAITED_IN_PHASES, "in_gaps": _WAITED_IN_GAPS} | places
    columns = ", ".join(f"({sql})::DOUBLE AS c{number}" for number, sql in enumerate(parts.values()))
    names = [f"c{number}" for number in range(len(parts))]
    claimed = " + ".join(f"coalesce({name}, 0)" for name in names)
    sums = ", ".join(f"sum({name} * fit * {weight})" for name in names)
    return f"""
        SELECT {group_by}{more}, sum({weight}), sum(took * {weight}), {sums} FROM (
            SELECT *, least(1.0, coalesce(took / nullif({claimed}, 0), 1.0)) AS fit FROM (
                SELECT *, greatest(duration_ns, 0)::DOUBLE AS took, {columns} FROM ({steps})))
        GROUP BY {group_by} ORDER BY {group_by}"""
