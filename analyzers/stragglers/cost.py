"""Cost of a straggler: the step and the run without it, by replaying its recorded steps (`whatif`).

    cost = cost_of(source, timings, suspect)
    cost.step_ms, cost.step_without_ms, cost.saved_s, cost.basis

If too little was recorded to replay (`basis` is then "excess"), the excess over the next slowest rank is subtracted
from the step, which is exact if the rank was last everywhere. In both cases the gain is limited to the growth of the
step when the rank became slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzers.account.timings import Timings
from analyzers.communication.slow_link import SlowLink
from analyzers.finding import Severity
from analyzers.policy import SHARED
from analyzers.source import Source
from analyzers.stragglers.comparison.peer_comparison import Growth, Straggler, step_growth
from analyzers.stragglers.suspects import Suspect
from analyzers.whatif.step_graph import StepGraph, load_graph
from analyzers.whatif.what_if import why_withheld, without

__all__ = ["Cost", "cost_of", "cost_of_link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Step time (ms) as the run was, and without the straggler; seconds that the straggler cost the run."""

    step_ms: float
    step_without_ms: float
    saved_s: float
    run_s: float
    """Time of all steps of the attempt that were compared."""
    basis: str
    error_ratio: float | None = None
    replayed: tuple[int, int] | None = None
    """First and last step over which `step_ms` is measured: the newest of the slow ones. None if no step was
    replayed.
    """
    withheld: str = ""
    """Reason why no gain is reported; empty if a gain is reported."""

    @property
    def speedup(self) -> float:
        """Recorded step time / step time without the straggler."""
        return self.step_ms / max(self.step_without_ms, 1e-9)

    def severity(self) -> Severity:
        """Severity of the finding, by the gain of the run without it, if known."""
        if self.withheld:
            return "warning"
        if self.speedup >= SHARED.doubled_factor:
            return "critical"
        return "info" if self.speedup < 1 + SHARED.min_gain_ratio else "warning"

    def evidence(self) -> dict[str, Any]:
        """The cost as evidence of a finding."""
        measured: dict[str, Any] = {"step_ms": round(self.step_ms, 3), "run_s": round(self.run_s, 3)}
        if self.replayed:
            measured |= dict(zip(("replayed_first_step", "replayed_last_step"), self.replayed, strict=True))
        if self.withheld:  # the time of the step without the straggler was not predicted, for this reason
            return measured | {"whatif_withheld": self.withheld}
        return measured | {
            "step_without_it_ms": round(self.step_without_ms, 3),
            "speedup_without_it_ratio": round(self.speedup, 3),
            "run_without_it_s": round(max(0.0, self.run_s - self.saved_s), 3),
            "whatif_basis": self.basis,
            "replay_error_ratio": None if self.error_ratio is None else round(self.error_ratio, 4),
        }


def cost_of(source: Source, timings: Timings, suspect: Suspect) -> Cost:
    """Cost of slow ranks. The last slow stretch of the worst rank is replayed and stands for all their slow steps."""
    worst = suspect.worst
    run_s = _run_s(timings)
    if suspect.pattern == "rotating":  # a rank costs time only in the steps in which it was the slowest
        saved_s = sum((m.step_ms - m.step_without_ms) * m.num_steps for m in suspect.members) / 1e3
        return Cost(
            step_ms=worst.step_ms, step_without_ms=worst.step_without_ms, saved_s=saved_s, run_s=run_s, basis="excess"
        )
    segment = worst.segments[-1]
    found = load_graph(source, timings.attempt, int(timings.steps[segment.begin]), int(timings.steps[segment.end - 1]))
    if found is None:
        step_ms, without_ms, basis, error = worst.step_ms, worst.step_without_ms, "excess", None
        withheld = ""
    else:
        peers = _peers(timings, worst.cause)
        step_ms, basis, error = found.measured_ms, found.basis, found.error_ratio
        withheld = why_withheld(found)
        pauses = worst.paused_ratio > 0
        before = {member.rank: 1 / max(member.factor, 1.0) for member in suspect.members if not member.has_peers}
        with_peers = [rank for rank in suspect.ranks if rank not in before]
        replayed_ms = without(found, with_peers, peers, share=_share(worst), pauses=pauses, faster_ranks=before)
        without_ms = step_ms if withheld else min(step_ms, replayed_ms)
    if (growth := step_growth(timings, worst)) is not None:
        gain_ms = step_ms - without_ms
        if not withheld and _is_lost_in_noise(growth, gain_ms):
            withheld = "earlier steps were as slow for other reasons"
        without_ms = step_ms if withheld else step_ms - min(gain_ms, growth.ms)
    saved_s = (step_ms - without_ms) * worst.num_steps / 1e3
    return Cost(
        step_ms=step_ms, step_without_ms=without_ms, saved_s=saved_s, run_s=run_s, basis=basis, error_ratio=error,
        replayed=found.step_span if found else None, withheld=withheld,
    )  # fmt: skip


def _run_s(timings: Timings) -> float:
    """Time of all compared steps: a stamped step stands for all steps since the previous stamped one."""
    stands_for = np.append(1, np.maximum(np.diff(timings.steps), 1))
    return float(np.sum(np.max(timings.duration, axis=0) * stands_for)) / 1e3


def _is_lost_in_noise(growth: Growth, gain_ms: float) -> bool:
    """Return True if the step grew by much less than the gain that the replay predicts, and the earlier steps vary as
    much as that gain: then neither number is the cost.
    """
    return growth.ms < (1 - SHARED.agreement_ratio) * gain_ms <= gain_ms <= growth.sigma_ms


def cost_of_link(source: Source, timings: Timings, link: SlowLink) -> Cost | None:
    """Return what a slow link costs: the gain if its groups' transfers were as fast as other groups', or as before."""
    found: StepGraph | None = load_graph(source, timings.attempt, link.first_step, link.last_step)
    if found is None or found.basis != "calls":
        return None
    faster = {group.partition(":")[0]: 1 / max(link.factor, 1.0) for group in link.groups}
    without_ms = min(found.measured_ms, without(found, (), {}, faster_calls=faster))
    return Cost(
        step_ms=found.measured_ms,
        step_without_ms=without_ms,
        saved_s=(found.measured_ms - without_ms) * (link.last_step - link.first_step + 1) / 1e3,
        run_s=_run_s(timings),
        basis=found.basis,
        error_ratio=found.error_ratio,
        replayed=found.step_span,
        withheld=why_withheld(found),
    )


def _share(straggler: Straggler) -> float:
    """Return this cause's share of the rank's total excess."""
    if straggler.cause == "data":
        of_cause = straggler.phase_excess_ms.get("data", 0.0)
    else:
        of_cause = sum(value for phase, value in straggler.phase_excess_ms.items() if phase != "data")
    whole = sum(max(0.0, value) for value in straggler.phase_excess_ms.values())
    return float(np.clip(of_cause / whole, 0.0, 1.0)) if whole > 0 else 1.0


def _peers(timings: Timings, cause: str) -> Mapping[int, list[int]]:
    groups = [timings.ranks[rows].tolist() for rows in (timings.data_peers if cause == "data" else timings.peers)]
    return {rank: group for group in groups for rank in group}
