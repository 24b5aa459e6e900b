"""Account of the steps: every nanosecond of a rank's finished steps in exactly one class.

    for account in step_accounts(source):
        account.own_ns["forward_to_backward"], account.waiting_ns, account.transfer_ns, account.not_measured_ns

Own work is split by phase and by gap between phases (`time_classes`). A wait is for a late rank or for the transfer
itself (`wait_split`). A pipeline stage without work is idle. Time that no column accounts for was not measured. The
classes always add up to the step: if the columns of a step exceed its duration, all of them are scaled down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analyzers.account.device.device_timings import DEVICE
from analyzers.account.device.measured_by import has_uncompared_gaps
from analyzers.account.time_classes import GAPS, StepSums, sums_sql
from analyzers.account.wait_split import WaitSplit, split_waits
from analyzers.run.calls.snapshot import attempts
from analyzers.source import READ_CALLS, Source, every_kth, lacking

__all__ = ["Coverage", "StepAccount", "coverage", "divide", "step_accounts"]

MAX_STEPS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """Sums over finished steps of one rank, nanoseconds. The classes add up to `duration_ns`."""

    attempt: int
    rank: int
    num_steps: int
    duration_ns: int
    own_ns: Mapping[str, int]
    """Own work by phase and gap; a gap that was never measured is missing."""
    waiting_ns: int
    """Waiting for late ranks; includes the transfer if the two cannot be separated."""
    transfer_ns: int | None
    """None if it cannot be separated from waiting."""
    idle_ns: int | None
    """Time of a pipeline stage without work; None without a recorded pipeline."""
    not_measured_ns: int
    """Time that no column accounts for."""
    in_flight_ns: int = 0
    """Communication was in flight: exposed, or hidden behind computing or a late host. Which of them is unknown."""
    host_late_ns: int = 0
    """A GPU waited for its host to enqueue work, and no communication was in flight."""

    @property
    def has_phases(self) -> bool:
        """True if the loop recorded the time of its phases."""
        return any(self.own_ns.get(phase) for phase in ("forward", "backward", "optimizer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Shares of the total step time that cannot be judged."""

    not_measured_ratio: float
    not_compared_ratio: float
    """Measured but not compared between ranks: gaps on the host of a GPU."""


def divide(sums: StepSums, split: WaitSplit, attempt: int, rank: int) -> StepAccount:
    """Put the sums of a rank's steps into classes. Pure.

    1. If a GPU's calls were timed but its phases were not, the time in no column is divided according to
       `DeviceShares`, and all waits count as waiting for late ranks.
    2. The idle time of a pipeline stage is recorded as waiting in gaps between phases. It is subtracted from those
       waits first, then from gaps without a recorded wait, from unmeasured time, and from waits for late ranks.
    3. All other waits are divided by the share that was for late ranks.
    """
    own_ns = dict(sums.own_ns)
    waited = sums.waited_in_phases_ns + sums.waited_in_gaps_ns
    shares = split.device.get((attempt, rank))
    if shares is not None:
        own_ns.pop("data", None)  # loading takes no time of the step, because the device works meanwhile
        rest = sums.duration_ns - sum(own_ns.values()) - waited
        own_ns |= {"data": round(rest * shares.data), DEVICE: round(rest * shares.device)}
        in_flight, host_late = round(rest * shares.in_flight), 0
        waited += rest - own_ns["data"] - own_ns[DEVICE] - in_flight
    else:
        in_flight = round(sums.late_ns * split.in_flight_ratio.get((attempt, rank), 0.0))
        host_late = sums.late_ns - in_flight
    missing = sums.duration_ns - sum(own_ns.values()) - waited - in_flight - host_late
    idle = round(split.idle_ns[attempt, rank] * sums.num_steps) if (attempt, rank) in split.idle_ns else None
    left = idle or 0  # idle time that has not yet been subtracted from another class
    in_gaps, left = _reduced(sums.waited_in_gaps_ns, left)
    waited -= sums.waited_in_gaps_ns - in_gaps
    for gap in GAPS:
        if gap in own_ns:
            own_ns[gap], left = _reduced(own_ns[gap], left)
    missing, left = _reduced(missing, left)
    late_ratio = split.late_ratio.get((attempt, rank)) if shares is None else None
    waiting = waited if late_ratio is None else round(waited * late_ratio)
    transfer = None if late_ratio is None else waited - waiting
    waiting, left = _reduced(waiting, left)
    return StepAccount(
        attempt=attempt,
        rank=rank,
        num_steps=sums.num_steps,
        duration_ns=sums.duration_ns,
        own_ns=own_ns,
        waiting_ns=waiting,
        transfer_ns=transfer,
        idle_ns=None if idle is None else idle - left,
        not_measured_ns=missing,
        in_flight_ns=in_flight,
        host_late_ns=host_late,
    )


def _reduced(amount: int, by: int) -> tuple[int, int]:
    """`amount` minus `by`, but not below 0, and the part of `by` that could not be subtracted."""
    part = min(by, amount)
    return amount - part, by - part


def step_accounts(source: Source, attempt: int | None = None, since_step: int = 0) -> list[StepAccount]:
    """Read the accounts of all ranks; empty without finished steps. In long runs only every k-th step is read."""
    if lacking(source, steps=("duration_ns",)):
        return []
    every = every_kth(source, "steps", READ_CALLS, MAX_STEPS)
    chosen = "SELECT * FROM steps WHERE duration_ns IS NOT NULL AND rank >= 0 AND step % ? = 0 AND step >= ?"
    given = [every, since_step]
    if attempt is not None:
        chosen += " AND attempt = ?"
        given.append(attempt)
    split = split_waits(source, attempt, since_step)
    return [
        divide(StepSums.of_row(sums), split, at, rank)
        for at, rank, *sums in source.rows(sums_sql(chosen, "attempt, rank"), given)
    ]


def coverage(source: Source) -> Coverage | None:
    """Coverage over all ranks and attempts; None without finished steps."""
    accounts = step_accounts(source)
    total = sum(account.duration_ns for account in accounts)
    if total <= 0:
        return None
    uncompared = {attempt for attempt in attempts(source) if has_uncompared_gaps(source, attempt)}
    skipped = sum(account.own_ns.get(gap, 0) for account in accounts for gap in GAPS if account.attempt in uncompared)
    missing = sum(account.not_measured_ns for account in accounts)
    return Coverage(not_measured_ratio=missing / total, not_compared_ratio=skipped / total)
