"""Corroborate a slow rank by CPU time and kernel counters: it computed more, or its host kept it from computing.

    counters = load_counters(source, attempt=0, slow=(3, [(40, 90)]), peers=[0, 1, 2])
    attribute(counters, cause="compute", excess_ms=12.0, factor=1.3)      # Attribution(cause="host", ...)

The rank is compared with the median of its peers, in milliseconds per step. The values are medians over the slow steps,
or means for a rank that pauses. Steps between two slow stretches, in which the rank is as fast as usual, are left out.

1. Garbage collections explain the excess: host.
2. On a CPU, the rank's CPU time and wall time exceed its peers' by about the same factor: the rank computes more. On a
   busy host such a rank also waits longer for a core, in proportion.
3. The time for which the rank's thread was runnable and waited for a core explains the excess: host. Waits in
   proportion to the rank's additional CPU time belong to its work, not to the host.
4. The rank trains on more tokens than its peers, by the same factor: its sequences are longer, and no machine is bad.
   Rule 2 then does not apply.
5. On a CPU, a rank that computes more must have additional CPU time. In other cases the rank was kept from running: by
   the disk (major page faults), by a busy core (CPU time and waits for a core together are most of the excess), or by a
   lock or blocking call. Rule 5 does not apply to GPUs, where host CPU time shows nothing about the device, nor to
   loading, which may just wait for a disk.
6. A value that was not recorded decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from analyzers.policy import SHARED
from analyzers.source import Source, floats, ints
from analyzers.stragglers.policy import CorroborationPolicy
from analyzers.wording import number

__all__ = ["MAX_STEPS", "REASONS", "Attribution", "Counters", "attribute", "load_counters", "some_peers"]

Reason = Literal["", "core", "gc", "paging", "blocked", "kept"]
REASONS: dict[str, str] = {
    "core": "It waits for a core that another process uses.",
    "gc": "Python's garbage collector runs.",
    "paging": "Its memory is read back from disk.",
    "blocked": "It is idle off-CPU: waiting on a lock, disk or sleep.",
    "kept": "Its CPU time did not rise, so it was kept off the CPU.",
}
"""How the host slows the rank, one sentence per reason."""
_COLUMNS = ("cpu_ns", "run_delay_ns", "gc_ns", "major_faults", "tokens")
Span = tuple[int, int]
"""First and last step of a slow stretch."""
MAX_STEPS = 200
"""Maximum number of newest steps that are read."""
MAX_PEERS = 32
"""Maximum number of peers that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Excess of a rank over its peers, median or mean per step; None if not recorded."""

    cpu_ms: float | None = None
    cpu_ratio: float | None = None
    """CPU time per step divided by the peers' CPU time per step, minus 1."""
    run_delay_ms: float | None = None
    own_run_delay_ms: float | None = None
    """The rank's whole wait for a core (ms per step), not only its excess."""
    usual_run_delay_ms: float | None = None
    """Wait of all these ranks for a core in the other judged steps (ms per step)."""
    usual_core_wait_ratio: float | None = None
    """Sum of these waits / CPU time of these ranks. If nearly all judged steps are slow, the peers' ratio in the slow
    steps."""
    slow_s: float | None = None
    """How long the slow steps lasted (s)."""
    gc_ms: float | None = None
    major_faults: float | None = None
    tokens_ratio: float | None = None
    """Tokens per step divided by the peers' tokens per step, minus 1."""
    on_cpu: bool = False
    """True if the rank computes on the host's CPU, so that its CPU time is its work."""
    num_steps: int = 0

    @property
    def is_crowded(self) -> bool:
        """Return True if these ranks also wait for cores in other steps: their machine has too few."""
        return (self.usual_core_wait_ratio or 0.0) >= SHARED.explained_ratio

    def has_own_core(self, policy: CorroborationPolicy) -> bool:
        """Return True if the rank waits for a core much longer than its peers, and than all ranks do at other times. If
        several ranks share too few cores, one may have a core to itself for some seconds; the other is then no slower
        than usual, or slower for just as long. Unknown values decide nothing.
        """
        if self.run_delay_ms is None or self.own_run_delay_ms is None:
            return True
        if self.is_crowded and self.slow_s is not None and self.slow_s < policy.crowded_s:
            return False
        others_ms = max(self.own_run_delay_ms - self.run_delay_ms, self.usual_run_delay_ms or 0.0)
        return self.own_run_delay_ms - others_ms >= SHARED.minor_ratio * self.own_run_delay_ms

    def is_share_of_waits(self, excess_ms: float, policy: CorroborationPolicy) -> bool:
        """Return True if a compute excess is small compared with the rank's waits for a core on a busy machine, and its
        CPU time is hardly above its peers'. Healthy ranks differ as much there, even if the medians of their waits
        explain only a part of the excess."""
        own_ms = self.own_run_delay_ms
        if not self.on_cpu or own_ms is None or not self.is_crowded:
            return False
        return excess_ms < SHARED.minor_ratio * own_ms and (self.cpu_ratio or 0.0) < policy.crowded_cpu_ratio

    def within(self, excess_ms: float) -> Counters:
        """CPU time and waits for a core as parts of the excess. They are medians over other steps than the excess, so
        their sum may exceed it: then both are reduced in proportion, so that a report's parts add up."""
        cpu_ms, waits_ms = max(0.0, self.cpu_ms or 0.0), max(0.0, self.run_delay_ms or 0.0)
        if not self.on_cpu or cpu_ms + waits_ms <= excess_ms:
            return self
        fit = max(0.0, excess_ms) / (cpu_ms + waits_ms)
        return replace(
            self,
            cpu_ms=None if self.cpu_ms is None else min(self.cpu_ms, fit * cpu_ms),
            run_delay_ms=None if self.run_delay_ms is None else min(self.run_delay_ms, fit * waits_ms),
        )

    def waiting_part(self, excess_ms: float) -> str:
        """A sentence if half of a compute excess or more is waiting for a core, and thus not work of the rank."""
        if not self.on_cpu or self.cpu_ms is None or self.run_delay_ms is None:
            return ""
        if self.run_delay_ms < SHARED.explained_ratio * max(excess_ms, 1e-9):
            return ""
        parts = self.within(excess_ms)
        worked = f"{number(parts.cpu_ms)} ms is CPU time and " if self.cpu_ms > 0 else ""
        return f"Of the extra time, {worked}{number(parts.run_delay_ms)} ms is waiting for a core."

    def evidence(self) -> dict[str, Any]:
        """Values in which the rank exceeds its peers, for a finding's evidence. Lower values explain nothing."""
        known = {
            "cpu_time_excess_ms": self.cpu_ms,
            "core_wait_excess_ms": self.run_delay_ms,
            "gc_excess_ms": self.gc_ms,
            "major_faults_excess": self.major_faults,
            "tokens_excess_ratio": self.tokens_ratio,
        }
        return {name: round(value, 3) for name, value in known.items() if value is not None and value >= 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The cause of an excess; `confirmed` if the counters support it."""

    cause: str
    reason: Reason = ""
    confirmed: bool = False
    is_waiting: bool = False
    """True if most of the excess is waiting for a core, and CPU time does not explain the factor."""


def attribute(
    counters: Counters, *, cause: str, excess_ms: float, factor: float, policy: CorroborationPolicy | None = None
) -> Attribution:
    """Attribute an excess that wall times show in `cause` (compute or data). Pure.

    `excess_ms` is per step; `factor` is the rank's time / its peers' time."""
    policy = policy or CorroborationPolicy()
    enough = SHARED.explained_ratio * max(excess_ms, 1e-9)
    is_waiting = counters.run_delay_ms is not None and counters.run_delay_ms >= enough
    if counters.gc_ms is not None and counters.gc_ms >= enough:
        return Attribution(cause="host", reason="gc", confirmed=True)
    computes_more = (counters.cpu_ratio or 0.0) >= SHARED.explained_ratio * max(factor - 1, 1e-9)
    if cause != "data" and counters.on_cpu and computes_more and not _has_more_tokens(counters, factor):
        return Attribution(cause=cause, confirmed=True)
    waits_of_work_ms = _waits_of_more_work_ms(counters) if cause != "data" else 0.0
    if counters.run_delay_ms is not None and counters.run_delay_ms - waits_of_work_ms >= enough:
        return Attribution(cause="host", reason="core", confirmed=True, is_waiting=True)
    if _has_more_tokens(counters, factor):
        return Attribution(cause="sequence_length", confirmed=True)
    if cause != "compute" or not counters.on_cpu or counters.cpu_ms is None:
        return Attribution(cause=cause)
    is_waiting = is_waiting and 1 + (counters.cpu_ratio or 0.0) < SHARED.doubled_factor
    if counters.cpu_ms + waits_of_work_ms >= SHARED.explained_ratio * excess_ms:
        return Attribution(cause=cause, confirmed=True, is_waiting=is_waiting)
    if counters.major_faults is not None and counters.major_faults >= policy.paging_faults:
        return Attribution(cause="host", reason="paging", confirmed=True)
    if counters.run_delay_ms is None:
        return Attribution(cause="host", reason="kept", confirmed=True)
    idle_ms = excess_ms - max(0.0, counters.cpu_ms) - max(0.0, counters.run_delay_ms)
    reason: Reason = "blocked" if idle_ms >= enough else "core"
    return Attribution(cause="host", reason=reason, confirmed=True, is_waiting=reason == "core")


def _waits_of_more_work_ms(counters: Counters) -> float:
    """Return the part of the wait for a core that is caused by additional CPU time. On a busy host each millisecond of
    work waits equally long, so if a rank has three times the work, two thirds of its wait are due to that."""
    own, ratio = counters.own_run_delay_ms, counters.cpu_ratio or 0.0
    if not counters.on_cpu or own is None or counters.run_delay_ms is None or ratio <= 0:
        return 0.0
    return max(0.0, min(counters.run_delay_ms, own * ratio / (1 + ratio)))


def _has_more_tokens(counters: Counters, factor: float) -> bool:
    return factor > 1 and (counters.tokens_ratio or 0.0) >= SHARED.explained_ratio * (factor - 1)


def some_peers(peers: Sequence[int], rank: int) -> list[int]:
    """The peers except `rank`; every n-th of more than `MAX_PEERS`."""
    others = [peer for peer in peers if peer != rank]
    return others[:: max(1, -(-len(others) // MAX_PEERS))]


def load_counters(
    source: Source,
    attempt: int,
    slow: tuple[int, Sequence[Span]],
    peers: Sequence[int],
    *,
    judged: tuple[int, int] | None = None,
    means: bool = False,
) -> Counters:
    """Read the newest slow steps of a rank and of its peers; empty if not recorded. `slow`: (rank, its slow stretches).

    `judged`: first and last compared step, to read usual values outside of the slow steps.
    """
    rank, spans = slow
    last_step = max(last for _, last in spans)
    typical = np.nanmean if means else np.nanmedian
    ranks = [rank, *some_peers(peers, rank)]
    table = source.query(
        f"""
        SELECT rank, {", ".join(_COLUMNS)} FROM steps
        WHERE attempt = ? AND step >= ? AND {_within(spans)} AND duration_ns IS NOT NULL
          AND rank IN ({", ".join(map(str, ranks))})
        """,
        [attempt, last_step - MAX_STEPS + 1],
    )
    of_row, read = ints(table["rank"]), {name: floats(table[name]) for name in _COLUMNS}
    is_own = of_row == rank
    if len(np.unique(is_own)) < 2:  # no rows of the rank, or none of its peers
        return Counters()
    excess: dict[str, float | None] = {}
    of_rank: dict[str, float | None] = {}
    ratios: dict[str, float | None] = {}
    for name in _COLUMNS:
        values = read[name]
        each = [_typical(values[of_row == peer], typical) for peer in ranks[1:]]
        theirs = [value for value in each if value is not None]
        mine = _typical(values[is_own], typical)
        of_rank[name] = mine
        ratios[name] = mine / float(np.median(theirs)) - 1 if mine and theirs and min(theirs) else None
        excess[name] = mine - float(np.median(theirs)) if mine is not None and theirs else None
    counters = Counters(
        cpu_ms=_ms(excess["cpu_ns"]),
        cpu_ratio=ratios["cpu_ns"],
        run_delay_ms=_ms(excess["run_delay_ns"]),
        own_run_delay_ms=_ms(of_rank["run_delay_ns"]),
        gc_ms=_ms(excess["gc_ns"]),
        major_faults=excess["major_faults"],
        tokens_ratio=ratios["tokens"],
        on_cpu=_on_cpu(source, attempt, rank),
        num_steps=int(is_own.sum()),
    )
    if judged is None:
        return counters
    slow_s, usual_ns, wait_ratio, num_usual = _usual_waits(source, attempt, slow, ranks, judged, means)
    if num_usual < SHARED.min_steps:
        waits, worked = (float(np.nansum(read[name][~is_own])) for name in ("run_delay_ns", "cpu_ns"))
        usual_ns, wait_ratio = None, waits / worked if worked else None
    return replace(counters, usual_run_delay_ms=_ms(usual_ns), usual_core_wait_ratio=wait_ratio, slow_s=slow_s)


def _usual_waits(
    source: Source,
    attempt: int,
    slow: tuple[int, Sequence[Span]],
    ranks: Sequence[int],
    judged: tuple[int, int],
    means: bool,
) -> tuple[float | None, float | None, float | None, int]:
    """Read how long the slow steps lasted, and how long the same ranks waited for a core in the other steps.

    The wait is returned in nanoseconds and as a share of the CPU time of these ranks. The last value is the number of
    the other steps.
    """
    rank, spans = slow
    first_step = min(first for first, _ in spans)
    typical = "avg" if means else "median"
    ((slow_s, usual_ns, wait_ratio, num_usual),) = source.rows(
        f"""
        SELECT sum(duration_ns) FILTER (is_slow AND rank = ?) / 1e9, {typical}(run_delay_ns) FILTER (NOT is_slow),
               sum(run_delay_ns) FILTER (NOT is_slow) / nullif(sum(cpu_ns) FILTER (NOT is_slow), 0),
               count(DISTINCT step) FILTER (NOT is_slow)
        FROM (SELECT *, {_within(spans)} AS is_slow FROM steps WHERE attempt = ? AND step BETWEEN ? AND ?
              AND duration_ns IS NOT NULL AND rank IN ({", ".join(map(str, ranks))}))
        """,
        [rank, attempt, max(judged[0], first_step - MAX_STEPS), judged[1]],
    )
    slow_s, usual_ns, wait_ratio = (None if value is None else float(value) for value in (slow_s, usual_ns, wait_ratio))
    return slow_s, usual_ns, wait_ratio, int(num_usual)


def _within(spans: Sequence[Span]) -> str:
    """SQL condition: the step lies in one of these stretches."""
    return "(" + " OR ".join(f"step BETWEEN {int(first)} AND {int(last)}" for first, last in spans) + ")"


def _typical(values: Any, typical: Callable[[Any], Any]) -> float | None:
    return None if np.isnan(values).all() else float(typical(values))


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / 1e6


def _on_cpu(source: Source, attempt: int, rank: int) -> bool:
    if not source.has("ranks"):
        return False
    rows = source.rows(
        "SELECT arg_max(device, wall_ns) FROM ranks WHERE attempt = ? AND rank = ? GROUP BY rank", [attempt, rank]
    )
    return bool(rows) and rows[0][0] == "cpu"
