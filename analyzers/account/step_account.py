"""Account of the steps: every nanosecond of a rank's finished steps in exactly one class.

    for account in step_accounts(source):
        account.own_ns["forward_to_backward"], account.waiting_ns, account.transfer_ns, account.not_measured_ns

Own work is by phase and by gap between phases, without waits for other ranks; waits inside checkpoints and evaluations
belong to those. Waits in phases and gaps are for a late rank or the transfer itself (`wait_split`). What no column
accounts for was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analyzers.account.timings import GAPS, has_host_gaps
from analyzers.account.wait_split import split_waits
from analyzers.run.snapshot import attempts
from analyzers.source import Source, every_kth, lacking
from probes.step_clock import PHASES

__all__ = ["Coverage", "StepAccount", "coverage", "step_accounts"]

MAX_ROWS = 4_000_000
MAX_STEPS = 20_000
_WITH_WAIT = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """Sums over the finished steps of one rank in one attempt, nanoseconds."""

    attempt: int
    rank: int
    duration_ns: int
    own_ns: Mapping[str, int]
    """By phase and gap; a gap that was never measured is not in it."""
    waiting_ns: int
    """Waiting for late ranks; the transfer, too, where nothing tells them apart."""
    transfer_ns: int | None
    """None where nothing tells it from waiting."""

    @property
    def not_measured_ns(self) -> int:
        """Time that no column accounts for."""
        return self.duration_ns - sum(self.own_ns.values()) - self.waiting_ns - (self.transfer_ns or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Share of the time of all steps that can be judged."""

    not_measured_ratio: float
    not_compared_ratio: float
    """Measured, and not compared between ranks: gaps on the host of a GPU."""

    @property
    def unjudged_ratio(self) -> float:
        """Both together."""
        return self.not_measured_ratio + self.not_compared_ratio


def step_accounts(source: Source) -> list[StepAccount]:
    """Read the accounts of all ranks, of long runs over every k-th step; empty without finished steps."""
    if lacking(source, steps=("duration_ns",)):
        return []
    phases = [(p, f"coalesce({p}_ns, 0)", f"coalesce({p}_wait_ns, 0)" if p in _WITH_WAIT else "0") for p in PHASES]
    own = [f"sum({time} - {wait})" for _, time, wait in phases]
    own += [f"sum({gap}_ns - {gap}_wait_ns)" for gap in GAPS]
    in_phases = " + ".join(wait for _, _, wait in phases)
    in_gaps = " + ".join(f"{gap}_wait_ns" for gap in GAPS)
    # Without gaps, whatever the step waited beyond its phases was between them.
    beyond = f"greatest(0, coalesce(collective_wait_ns, 0) - ({in_phases}))"
    rows = source.rows(
        f"""
        SELECT attempt, rank, sum(duration_ns), sum({in_phases} + coalesce({in_gaps}, {beyond})), {", ".join(own)}
        FROM steps WHERE duration_ns IS NOT NULL AND rank >= 0 AND step % ? = 0 GROUP BY ALL ORDER BY attempt, rank
        """,
        [every_kth(source, "steps", MAX_ROWS, MAX_STEPS)],
    )
    split = split_waits(source)
    found = []
    for attempt, rank, duration, waited, *spent in rows:
        late = split.late_ratio.get((attempt, rank))
        waiting = int(waited) if late is None else round(int(waited) * late)
        found.append(
            StepAccount(
                attempt=attempt,
                rank=rank,
                duration_ns=int(duration),
                own_ns={n: int(ns) for n, ns in zip((*PHASES, *GAPS), spent, strict=True) if ns is not None},
                waiting_ns=waiting,
                transfer_ns=None if late is None else int(waited) - waiting,
            )
        )
    return found


def coverage(source: Source) -> Coverage | None:
    """Measure it over all ranks and attempts; None without finished steps."""
    accounts = step_accounts(source)
    total = sum(account.duration_ns for account in accounts)
    if total <= 0:
        return None
    compared = {attempt: has_host_gaps(source, attempt) for attempt in attempts(source)}
    skipped = sum(
        account.own_ns.get(gap, 0) for account in accounts for gap in GAPS if not compared.get(account.attempt)
    )
    missing = sum(max(0, account.not_measured_ns) for account in accounts)
    return Coverage(not_measured_ratio=missing / total, not_compared_ratio=skipped / total)
