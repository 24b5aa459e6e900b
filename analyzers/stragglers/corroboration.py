"""Why a rank's wall time grew: it computed more, or the host kept it from computing. CPU time is the second witness.

    witness = load_witness(source, attempt=0, rank=3, peers=[0, 1, 2], first_step=40, last_step=90)
    judge(witness, cause="compute", excess_ms=12.0)      # Verdict(cause="host", reason="core", ...)

Compared are medians over the same steps (means, of a rank that pauses now and then), of the rank against the median of
its peers, in milliseconds a step:

1. Garbage collections explain the excess: host.
2. On a CPU the rank's CPU time is above its peers' by about the same factor as its wall time: it computes more. On a
   crowded host who computes more also waits for a core more, by as much again.
3. The time for which the rank's thread was ready to run and waited for a core explains it: host.
4. The rank trains on more tokens than its peers, by as much: its sequences are longer, and no machine is bad.
5. On a CPU the excess of CPU time must be there if the rank computes more. If it is not, the rank was kept from
   running: by the disk (pages that had to be read), or by a lock or a call that blocks. On a GPU the host's CPU time
   says nothing of the device, and a loader may well wait for a disk without using a core: there this is not asked.
6. What was not recorded decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from analyzers.source import Source, floats, ints

__all__ = ["REASONS", "Verdict", "Witness", "WitnessPolicy", "judge", "load_witness"]

Reason = Literal["", "core", "gc", "paging", "blocked", "kept"]
REASONS: dict[str, str] = {
    "core": "it waits for a core that somebody else has",
    "gc": "Python's garbage collector runs",
    "paging": "its memory is read back from a disk",
    "blocked": "it neither computes nor waits for a core: a lock, a disk or a sleep",
    "kept": "it does not compute more, so something keeps it from running",
}
"""What a host does to a rank, as people say it."""
_COLUMNS = ("cpu_ns", "run_delay_ns", "gc_ns", "major_faults", "tokens")
MAX_STEPS = 200
"""Newest steps that are looked at."""
MAX_PEERS = 32
"""Peers that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessPolicy:
    """Shares of the excess in wall time."""

    explained_ratio: float = 0.5
    """Excess in waiting for a core, or in the collector, from which it is the host's."""
    worked_ratio: float = 0.5
    """Excess in CPU time from which it is the rank's own work. A neighbour that takes half of the core's time also
    takes a part of the caches, so that CPU time grows as well, by less."""
    same_factor_ratio: float = 0.5
    """Growth of CPU time over growth of wall time, both over those of the peers, from which the rank computes more."""
    paging_faults: float = 1.0
    """Pages read from a disk a step, over the peers, from which a rank that does not run is said to be paging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """Excess of a rank over its peers, medians or means a step; None where it was not recorded."""

    cpu_ms: float | None = None
    cpu_ratio: float | None = None
    """CPU time of a step over that of the peers, less one."""
    run_delay_ms: float | None = None
    gc_ms: float | None = None
    major_faults: float | None = None
    tokens_ratio: float | None = None
    """Tokens of a step over those of the peers, less one."""
    on_cpu: bool = False
    """Whether the rank computes on the host's CPU, so that its CPU time is its work."""
    num_steps: int = 0

    def evidence(self) -> dict[str, Any]:
        """What is known, for a finding's evidence."""
        known = {
            "cpu_time_excess_ms": self.cpu_ms,
            "core_wait_excess_ms": self.run_delay_ms,
            "gc_excess_ms": self.gc_ms,
            "major_faults_excess": self.major_faults,
            "tokens_excess_ratio": self.tokens_ratio or None,
        }
        return {name: round(value, 3) for name, value in known.items() if value is not None and abs(value) >= 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The cause after the second witness was heard; `confirmed` if it had something to say."""

    cause: str
    reason: Reason = ""
    confirmed: bool = False


def judge(
    witness: Witness, *, cause: str, excess_ms: float, factor: float, policy: WitnessPolicy | None = None
) -> Verdict:
    """The cause of an excess that the wall clock calls `cause` (compute or data): `excess_ms` a step, `factor` times
    what the peers take. Pure."""
    policy = policy or WitnessPolicy()
    enough = policy.explained_ratio * max(excess_ms, 1e-9)
    if witness.gc_ms is not None and witness.gc_ms >= enough:
        return Verdict(cause="host", reason="gc", confirmed=True)
    computes_more = (witness.cpu_ratio or 0.0) >= policy.same_factor_ratio * max(factor - 1, 1e-9)
    if cause != "data" and witness.on_cpu and computes_more and not _has_more_tokens(witness, factor, policy):
        return Verdict(cause=cause, confirmed=True)
    if witness.run_delay_ms is not None and witness.run_delay_ms >= enough:
        return Verdict(cause="host", reason="core", confirmed=True)
    if _has_more_tokens(witness, factor, policy):
        return Verdict(cause="sequence_length", confirmed=True)
    if cause != "compute" or not witness.on_cpu or witness.cpu_ms is None:
        return Verdict(cause=cause)
    if witness.cpu_ms >= policy.worked_ratio * excess_ms:
        return Verdict(cause=cause, confirmed=True)
    if witness.major_faults is not None and witness.major_faults >= policy.paging_faults:
        return Verdict(cause="host", reason="paging", confirmed=True)
    return Verdict(cause="host", reason="kept" if witness.run_delay_ms is None else "blocked", confirmed=True)


def _has_more_tokens(witness: Witness, factor: float, policy: WitnessPolicy) -> bool:
    return factor > 1 and (witness.tokens_ratio or 0.0) >= policy.explained_ratio * (factor - 1)


def load_witness(
    source: Source,
    attempt: int,
    rank: int,
    peers: Sequence[int],
    first_step: int,
    last_step: int,
    *,
    means: bool = False,
) -> Witness:
    """Read the rank's and its peers' newest steps of the range; an empty witness where nothing is recorded."""
    typical = np.nanmean if means else np.nanmedian
    peers = [peer for peer in peers if peer != rank]
    every = -(-len(peers) // MAX_PEERS) if peers else 1
    ranks = [rank, *peers[::every]]
    table = source.query(
        f"""
        SELECT rank, {", ".join(_COLUMNS)} FROM steps
        WHERE attempt = ? AND step BETWEEN ? AND ? AND duration_ns IS NOT NULL AND rank IN ({", ".join(map(str, ranks))})
        """,  # noqa: E501
        [attempt, max(first_step, last_step - MAX_STEPS + 1), last_step],
    )
    of_row = ints(table["rank"])
    own = of_row == rank
    if not own.any() or own.all():
        return Witness()
    excess: dict[str, float | None] = {}
    ratios: dict[str, float | None] = {}
    for name in _COLUMNS:
        values = floats(table[name])
        each = [_typical(values[of_row == peer], typical) for peer in ranks[1:]]
        theirs = [value for value in each if value is not None]
        mine = _typical(values[own], typical)
        ratios[name] = mine / float(np.median(theirs)) - 1 if mine and theirs and min(theirs) else None
        excess[name] = mine - float(np.median(theirs)) if mine is not None and theirs else None
    return Witness(
        cpu_ms=_ms(excess["cpu_ns"]),
        cpu_ratio=ratios["cpu_ns"],
        run_delay_ms=_ms(excess["run_delay_ns"]),
        gc_ms=_ms(excess["gc_ns"]),
        major_faults=excess["major_faults"],
        tokens_ratio=ratios["tokens"],
        on_cpu=_on_cpu(source, attempt, rank),
        num_steps=int(own.sum()),
    )


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
