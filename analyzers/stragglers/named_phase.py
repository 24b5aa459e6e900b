"""The phase under a name of the loop's own in which a slow rank spends what its peers do not.

    named_phase(source, attempt=0, slow=straggler, peers=[0, 1, 2])      # "reward", or ""

The step's columns know forward, backward and optimizer; sampling completions or scoring them lies in a gap between
them. Spans tell which of them it is. Of two, one inside the other, the shorter says more.
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.account.named_phases import KNOWN_KINDS, phase_name
from analyzers.policy import SHARED
from analyzers.source import Source
from analyzers.stragglers.newest_steps import in_newest_steps
from analyzers.stragglers.peer_comparison import Straggler

__all__ = ["named_phase"]


def named_phase(source: Source, attempt: int, slow: Straggler, peers: Sequence[int]) -> str:
    """Return the phase that holds a slow rank's excess over the mean of its peers; empty if none does."""
    own, usual = in_newest_steps(source, attempt, slow, peers, _mean_ms)
    least_ms = SHARED.agreement_ratio * slow.excess_ms
    holding = [name for name in own if own[name] - usual.get(name, 0.0) >= least_ms]
    return phase_name(min(holding, key=lambda name: own[name], default=""))


def _mean_ms(source: Source, attempt: int, ranks: Sequence[int], first_step: int, last_step: int) -> dict[str, float]:
    """{name: own time of a step and rank}; a phase that is not in every step is as long as its mean over all."""
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
