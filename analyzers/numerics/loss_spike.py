"""Loss spikes in a recorded run: the verdicts of the streaming detector again, grouped and explained.

1. One rank's rows tell the global loss: the lowest rank that has one (in a pipeline, one of the last stage).
2. They are fed to a `SpikeDetector` in the order in which they ran, over rollbacks and restarts, as the live detector
   saw them; so a post-mortem gives the live verdicts again.
3. Spike steps at most `join_steps` observations apart are one finding.
4. Cause: learning_rate if the rate had jumped just before; batch if the loss was back within a few steps or the step
   was refused; divergence if it stayed up.
5. If the step was replayed (`analyzers.numerics.replay_evidence`) and the rate did not jump, the replay knows better
   than 4: transient if the loss did not come back, weights if it came back but not on the older state, else batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from analyzers.deaths.recovery_response import RESPONSE_EVENTS, Response, respond
from analyzers.finding import Finding
from analyzers.numerics.replay_evidence import REPLAY_EVENTS, Replayed, find_replay
from analyzers.run.event_log import EventLog
from analyzers.source import Source, missing_tables
from probes.guard.spike_detector import SpikeDetector, SpikePolicy, SpikeVerdict

__all__ = ["LossSpikePolicy", "Observation", "analyze", "find_spikes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpikePolicy:
    """How spike verdicts become findings."""

    detector: SpikePolicy = field(default_factory=SpikePolicy)
    join_steps: int = 3
    """Clean steps between two spikes that don't part them."""
    divergence_steps: int = 8
    """Spike steps from which the loss counts as diverged; a bad batch is felt for one to three steps."""
    rate_jump_ratio: float = 3.0
    """Learning rate over the median of the 16 steps before that explains a spike; warm-up grows by less per step once
    the detector is warm."""
    rate_reach_steps: int = 3
    """How long after such a rate a spike is still its doing (steps)."""
    since_step: int = 0
    """Only steps from here on (the live view); verdicts then start once the detector's history is full."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One run of a step, as the detector sees it."""

    attempt: int
    step: int
    loss: float
    grad_norm: float = math.nan
    lr: float | None = None
    batch_index: int | None = None
    committed: bool | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Spike:
    """Consecutive spike steps: indices into the observations, verdicts, cause."""

    indices: tuple[int, ...]
    verdicts: tuple[SpikeVerdict, ...]
    cause: str


def analyze(source: Source, policy: LossSpikePolicy | None = None) -> list[Finding]:
    """Findings of kind `loss_spike`."""
    policy = policy or LossSpikePolicy()
    observations = [] if missing_tables(source, "steps") else _observations(source, policy.since_step)
    if not observations:
        return [_insufficient("no loss is recorded")]
    log = EventLog.load(source, (*RESPONSE_EVENTS, *REPLAY_EVENTS))
    # With a part of the history the detector is another one than the run's until its memory is full.
    settled = policy.detector.history + policy.detector.level_window if policy.since_step > 0 else 0
    return [_finding(observations, s, log) for s in find_spikes(observations, policy) if s.indices[0] >= settled]


def find_spikes(observations: Sequence[Observation], policy: LossSpikePolicy | None = None) -> list[Spike]:
    """Judge observations in the order in which they ran. Pure."""
    policy = policy or LossSpikePolicy()
    detector = SpikeDetector(policy.detector)
    verdicts = [detector.observe(o.step, o.loss, o.grad_norm) for o in observations]
    groups: list[list[int]] = []
    for i, verdict in enumerate(verdicts):
        if not verdict.is_spike:
            continue
        if groups and i - groups[-1][-1] <= policy.join_steps + 1 and not _went_back(observations, groups[-1][-1], i):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [
        Spike(tuple(group), tuple(verdicts[i] for i in group), _cause(observations, group, policy)) for group in groups
    ]


def _went_back(observations: Sequence[Observation], before: int, now: int) -> bool:
    return any(observations[i + 1].step <= observations[i].step for i in range(before, now))


def _cause(observations: Sequence[Observation], group: Sequence[int], policy: LossSpikePolicy) -> str:
    first = group[0]
    rates = [o.lr for o in observations[max(0, first - 16 - policy.rate_reach_steps) : first + 1] if o.lr]
    if len(rates) > policy.rate_reach_steps + 1:
        before = sorted(rates[: -policy.rate_reach_steps - 1])
        usual = before[len(before) // 2]
        if max(rates[-policy.rate_reach_steps - 1 :]) >= policy.rate_jump_ratio * usual:
            return "learning_rate"
    return "divergence" if len(group) >= policy.divergence_steps else "batch"


def _observations(source: Source, since_step: int) -> list[Observation]:
    rows = source.rows(
        """
        SELECT attempt, step, loss, grad_norm, lr, batch_index, committed FROM steps
        WHERE step >= ? AND loss IS NOT NULL AND (attempt, rank) IN
              (SELECT (attempt, min(rank)) FROM steps WHERE step >= ? AND loss IS NOT NULL GROUP BY attempt)
        ORDER BY attempt, start_ns
        """,
        [since_step, since_step],
    )
    return list(_with_turns(rows))


def _with_turns(rows: Iterable[tuple[Any, ...]]) -> Iterable[Observation]:
    seen: dict[tuple[int, int], int] = {}
    for attempt, step, loss, grad_norm, lr, batch_index, committed in rows:
        turn = seen.get((attempt, step), 0)
        seen[attempt, step] = turn + 1
        norm = math.nan if grad_norm is None else float(grad_norm)
        yield Observation(attempt, step, float(loss), norm, lr, batch_index, committed, turn)


def _finding(observations: Sequence[Observation], spike: Spike, log: EventLog) -> Finding:
    worst = max(spike.verdicts, key=lambda verdict: verdict.loss_z)
    first, last = observations[spike.indices[0]], observations[spike.indices[-1]]
    response = respond(log, attempt=first.attempt, step=first.step, turn=first.turn, committed=first.committed)
    replayed = find_replay(log, attempt=first.attempt, step=first.step, turn=first.turn)
    if replayed is not None and spike.cause == "batch" and replayed.judgement in ("transient", "weights"):
        spike = replace(spike, cause=replayed.judgement)
    batches = [observations[i].batch_index for i in spike.indices]
    known = [batch for batch in batches if batch is not None]
    return Finding(
        analyzer="spike",
        kind="loss_spike",
        severity="critical" if spike.cause == "divergence" and not response.handled else "warning",
        status="fired",
        summary=_summary(first, last, worst, spike, known, response, replayed),
        first_step=first.step,
        last_step=last.step,
        cause=spike.cause,
        evidence={
            "loss": round(worst.loss, 5),
            "loss_before": round(worst.loss_level, 5),
            "loss_rise_ratio": None if worst.is_signed else round(worst.loss_rise_ratio, 4),
            "loss_z": round(worst.loss_z, 2),
            "grad_norm": _number(worst.grad_norm),
            "grad_norm_rise_ratio": _number(worst.grad_rise_ratio),
            "grad_norm_z": _number(worst.grad_z),
            "lr": first.lr,
            "num_steps": len(spike.indices),
            "batch_indices": known[:64],
            **response.evidence(),
            **(replayed.evidence() if replayed else {}),
        },
        advice=f"loss-spike-{spike.cause}",
        attempt=first.attempt,
    )


def _summary(
    first: Observation,
    last: Observation,
    worst: SpikeVerdict,
    spike: Spike,
    batches: list[int],
    response: Response,
    replayed: Replayed | None,
) -> str:
    where = f"step {first.step}" if first.step == last.step else f"steps {first.step} to {last.step}"
    norm = f", gradient norm {1 + worst.grad_rise_ratio:.1f}x" if worst.grad_rise_ratio > 0.2 else ""
    batch = f" on batch {batches[0]}" if batches and spike.cause == "batch" else ""
    rate = (
        f" after the learning rate jumped (now {first.lr:.3g})" if spike.cause == "learning_rate" and first.lr else ""
    )
    again = "" if replayed is None else f"; {replayed.text()}"
    stays = " and stays up" if spike.cause == "divergence" else ""
    share = "" if worst.is_signed else f"+{100 * worst.loss_rise_ratio:.0f} %, "
    return (
        f"{where}: the loss rises from {worst.loss_level:.3f} to {worst.loss:.3f} "
        f"({share}{worst.loss_z:.0f} sigma{norm}){batch}{rate}{stays}{again}; "
        f"{response.text}"
    )


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _insufficient(why: str) -> Finding:
    return Finding.insufficient("spike", "loss_spike", f"loss spikes were not looked for: {why}")
