"""Phases named by the loop (`rankscope.phase("reward")`, and TRL's trainers), besides training.

    for phase in named_phases(source):          # the longest first; empty if the loop names none
        phase.name, phase.own_ms, phase.share_ratio

Times are means over ranks and steps, without waits in collectives. `training` is forward, backward and optimizer. A
phase inside another one counts in both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from analyzers.account.time_classes import COMPUTE_PHASES, total
from analyzers.source import READ_ROWS, Source, every_kth, missing_tables
from probes.step_clock import PHASE_COLUMNS

__all__ = ["KNOWN_KINDS", "NamedPhase", "named_phases", "phase_name"]

KNOWN_KINDS = (*PHASE_COLUMNS, "send", "recv", "compile", "fingerprint", "rollback")
"""Kinds of spans that Rankscope records by itself."""
_LOST_NAME = r"\?\d+"
"""Kind of a span whose name was lost: it may be one of `KNOWN_KINDS`."""
MAX_PHASES = 12
MAX_NAME = 40
MAX_STEPS = 1 << 40
"""More steps than any run has: only the number of rows then decides which steps `every_kth` leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPhase:
    """Mean over the finished steps of all ranks."""

    name: str
    own_ms: float
    """Per step, without waits."""
    share_ratio: float
    """Share of the time of the steps."""


def phase_name(kind: str) -> str:
    """Make a name safe to print: characters that a page or a terminal might interpret become `_`."""
    return re.sub(r"[^\w .:/+-]", "_", kind)[:MAX_NAME]


def named_phases(source: Source) -> list[NamedPhase]:
    """The longest first, training among them."""
    if missing_tables(source, "steps", "spans"):
        return []
    known = ", ".join(f"'{kind}'" for kind in KNOWN_KINDS)
    scope = f"step % {every_kth(source, 'spans', READ_ROWS, MAX_STEPS)} = 0"
    rows = source.rows(
        f"SELECT kind, sum(greatest(end_ns - start_ns - coalesce(wait_ns, 0), 0))::DOUBLE FROM spans "
        f"WHERE end_ns IS NOT NULL AND {scope} AND kind NOT IN ({known}) "
        f"AND NOT regexp_full_match(kind, '{_LOST_NAME}') GROUP BY kind "
        f"ORDER BY 2 DESC, kind LIMIT {MAX_PHASES}"
    )
    ((num_steps, duration_ns, training_ns),) = source.rows(
        f"SELECT count(*), sum(duration_ns)::DOUBLE, sum({total(COMPUTE_PHASES)})::DOUBLE FROM steps "
        f"WHERE duration_ns IS NOT NULL AND {scope}"
    )
    if not rows or not duration_ns:
        return []
    times_ns = {str(kind): float(own_ns) for kind, own_ns in rows}
    if training_ns:
        times_ns.setdefault("training", float(training_ns))
    return [
        NamedPhase(
            name=phase_name(name), own_ms=times_ns[name] / num_steps / 1e6, share_ratio=times_ns[name] / duration_ns
        )
        for name in sorted(times_ns, key=lambda name: -times_ns[name])
    ]
