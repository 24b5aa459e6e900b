"""Loss spikes of a recorded run: the verdicts of the streaming detector, grouped into findings with a cause.

1. The loss of a step is the mean over the ranks that have a loss. In an attached loop each rank has the loss of its
   batch, with larger outliers than the mean. In the trainer, and in a pipeline's last stage, all ranks have equal
   losses. The newest steps are judged once all ranks with a loss have recorded them.
2. A `SpikeDetector` gets the losses in order of execution. If a rollback or a restart sets the step counter back, the
   detector's history goes back too, like the restored state of the live detector. The history is empty after a restart
   without a checkpoint, and for another training in the same process. A post-mortem thus repeats the live verdicts.
3. Spike steps at most `min_times` + 1 observations apart are one finding. A return from a few low steps to the earlier
   usual level is not a spike. Attempts that train a policy are left out (`analyzers.numerics.policy_loss`).
4. The cause is `learning_rate` if the learning rate had jumped just before. It is `batch` if the loss was back within a
   few steps, as after a refused step, or fell back later. It is `divergence` if the loss stayed up.
5. A replay of the step (`analyzers.numerics.replay_result`) refines the cause `batch`. The cause becomes `transient` if
   the spike did not recur. It becomes `weights` if the spike recurred, but not on the older state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from analyzers.deaths.recovery_response import RESPONSE_EVENTS, Response, respond
from analyzers.finding import Finding
from analyzers.numerics.policy import LossSpikePolicy
from analyzers.numerics.policy_loss import policy_attempts
from analyzers.numerics.replay_result import REPLAY_EVENTS, ReplayResult, find_replay
from analyzers.policy import SHARED
from analyzers.run.records.event_log import EventLog
from analyzers.run.records.trainings import training_starts
from analyzers.scope import Scope
from analyzers.source import Source, missing_tables
from analyzers.wording import loss_text, rise_text
from probes.guard.signed_loss import HISTORY, LEVEL_WINDOW
from probes.guard.spike_detector import SpikeDetector, SpikePolicy, SpikeVerdict

__all__ = ["Observation", "find_spikes", "loss_spikes"]


@dataclass(frozen=True, slots=True)
class Observation:
    """One execution of a step, as the detector's input."""

    attempt: int
    step: int
    loss: float
    grad_norm: float = math.nan
    lr: float | None = None
    batch_index: int | None = None
    committed: bool | None = None
    execution: int = 0


@dataclass(frozen=True, slots=True)
class Spike:
    """Consecutive spike steps: indices into the observations, verdicts, cause."""

    indices: tuple[int, ...]
    verdicts: tuple[SpikeVerdict, ...]
    cause: str
    after: After | None = None
    has_lasted: bool = False
    """True if the loss stayed up for so long that the summary says what it did afterwards."""

    @property
    def is_over(self) -> bool:
        """True if the loss was seen to come back."""
        return self.after is not None and self.after.has_fallen


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """The loss after a spike: the first step in which it was back below its earlier level, or how far it had fallen by
    the end of the records."""

    back_at: int | None
    last_step: int
    last_loss: float
    has_fallen: bool
    """True if the loss has lost most of its rise."""


def loss_spikes(source: Source, scope: Scope, policy: LossSpikePolicy = LossSpikePolicy()) -> list[Finding]:
    """Findings of kind `loss_spike`."""
    observations = [] if missing_tables(source, "steps") else _observations(source, scope.since_step, policy)
    if not observations:
        return [Finding.insufficient("spike", "loss_spike", "Loss spikes were not checked: no loss is recorded.")]
    policies = policy_attempts(source)
    observations = [one for one in observations if one.attempt not in policies]
    if not observations:
        text = "Loss spikes were not checked: the loss of a policy, or of models trained in turn, measures no progress."
        return [Finding.insufficient("spike", "loss_spike", text)]
    log = EventLog.load(source, (*RESPONSE_EVENTS, *REPLAY_EVENTS))
    # If judging begins in the middle of the run, the detector knows less history than the one in the run. Its results
    # differ until its memory is full.
    num_filling = HISTORY + LEVEL_WINDOW if scope.since_step > 0 else 0
    found = find_spikes(
        observations,
        policy,
        highest_loss=_highest_first_loss(source, scope.since_step),
        starts=training_starts(source),
    )
    spikes = [spike for spike in found if spike.indices[0] >= num_filling]
    return [
        _finding(observations, spike, log)
        for spike in spikes
        if scope.attempt in (None, observations[spike.indices[0]].attempt)
    ]


def find_spikes(
    observations: Sequence[Observation],
    policy: LossSpikePolicy = LossSpikePolicy(),
    *,
    highest_loss: float = 0.0,
    starts: Container[tuple[int, int]] = (),
) -> list[Spike]:
    """Judge observations in the order in which they ran. Pure.

    `highest_loss`: highest loss before the first observation. `starts`: (attempt, step) at which another training
    begins in the same process.
    """
    history = _History(policy.detector, highest_loss)
    series_start = 0
    groups: list[_Group] = []
    for i, seen in enumerate(observations):
        is_start = (seen.attempt, seen.step) in starts
        if i > 0 and (is_start or seen.step <= observations[i - 1].step):
            history.go_back(0 if is_start else seen.step)
            series_start = i
        verdict = history.observe(seen)
        if not verdict.is_spike:
            continue
        if not groups or groups[-1].indices[-1] < max(series_start, i - SHARED.min_times - 1):
            groups.append(_Group(rates=history.rates()))
        groups[-1].indices.append(i)
        groups[-1].verdicts.append(verdict)
        groups[-1].series_start = series_start
    spikes = []
    for group in groups:
        if _comes_back(observations, group):
            continue
        cause, after = _cause(group, policy), None
        before, first = observations[group.indices[0] - 1], observations[group.indices[0]]
        has_lasted = cause == "divergence"
        if before.attempt == first.attempt and before.step < first.step:
            # Steps that a restart repeats have the old, lower loss. That is no recovery.
            after = _after(observations, group)
            cause = "batch" if has_lasted and after.has_fallen else cause
        spikes.append(Spike(tuple(group.indices), tuple(group.verdicts), cause, after, has_lasted))
    return spikes


@dataclass(slots=True, kw_only=True)
class _Group:
    """Spike steps that are one finding, and the learning rates up to the first of them."""

    rates: list[float]
    series_start: int = 0
    """Index at which the step counter last went back before the newest of them."""
    indices: list[int] = field(default_factory=list)
    verdicts: list[SpikeVerdict] = field(default_factory=list)


class _History:
    """A detector that can restore its history as of an earlier step."""

    def __init__(self, policy: SpikePolicy, highest_loss: float) -> None:
        self._policy = policy
        self._before = highest_loss
        self._detector = SpikeDetector(policy, highest_loss=highest_loss)
        # Each entry: (observation, True if it was no spike, highest level of the loss up to this step).
        self._seen: list[tuple[Observation, bool, float]] = []

    def observe(self, seen: Observation) -> SpikeVerdict:
        verdict = self._detector.observe(seen.step, seen.loss, seen.grad_norm)
        self._seen.append((seen, verdict.state in ("ok", "warm_up"), self._detector.highest_loss))
        return verdict

    def go_back(self, step: int) -> None:
        """Restore the history before `step`."""
        while self._seen and self._seen[-1][0].step >= step:
            self._seen.pop()
        highest = self._seen[-1][2] if self._seen else self._before
        num_kept = HISTORY + LEVEL_WINDOW
        clean = itertools.islice((seen for seen, is_clean, _ in reversed(self._seen) if is_clean), num_kept)
        self._detector = SpikeDetector(self._policy, highest_loss=highest)
        self._detector.learn_history((seen.loss, seen.grad_norm) for seen in reversed(list(clean)))

    def rates(self) -> list[float]:
        """Learning rates of the newest steps."""
        newest = self._seen[-(SHARED.history + SHARED.min_times + 1) :]
        return [seen.lr for seen, _, _ in newest if seen.lr]


def _comes_back(observations: Sequence[Observation], group: _Group) -> bool:
    """Return True if the loss returns from a few low steps to the level of most earlier steps: a few easy or memorised
    batches are not a level from which the loss rose.
    """
    first = group.indices[0]
    before = [one.loss for one in observations[max(group.series_start, first - HISTORY) : first]]
    losses = [observations[i].loss for i in group.indices]
    if len(before) < 3 * LEVEL_WINDOW or not all(map(math.isfinite, (*before, *losses))):
        return False
    halfway = (group.verdicts[0].loss_level + median(losses)) / 2
    is_usual = sum(loss >= halfway for loss in before) >= SHARED.agreement_ratio * len(before)
    return is_usual and max(losses) <= max(before)


def _cause(group: _Group, policy: LossSpikePolicy) -> str:
    if len(group.rates) > SHARED.min_times + 1:
        before = sorted(group.rates[: -SHARED.min_times - 1])
        usual = before[len(before) // 2]
        if max(group.rates[-SHARED.min_times - 1 :]) >= SHARED.clear_factor * usual:
            return "learning_rate"
    return "divergence" if len(group.indices) >= policy.divergence_steps else "batch"


def _after(observations: Sequence[Observation], group: _Group) -> After:
    """Follow the loss after a spike, by medians of a few steps, until the run goes back to an earlier step."""
    first = observations[group.indices[0]]
    peak = max(group.verdicts, key=lambda verdict: verdict.loss_z)
    newest, losses, level = first.step, [first.loss], math.inf
    for one in itertools.islice(observations, group.indices[0] + 1, None):
        if one.attempt != first.attempt or one.step <= newest:
            break
        newest = one.step
        losses.append(one.loss)
        if len(losses) >= SHARED.block_steps:
            level = median(losses[-SHARED.block_steps :])
        if len(losses) > SHARED.block_steps and level <= peak.loss_level:
            return After(back_at=newest, last_step=newest, last_loss=level, has_fallen=True)
    return After(back_at=None, last_step=newest, last_loss=level, has_fallen=_has_fallen(peak, level))


def _has_fallen(peak: SpikeVerdict, level: float) -> bool:
    """Return True if only a minor part of the rise is left, measured in logarithms if the losses are positive."""
    if not math.isfinite(level) or not math.isfinite(peak.loss):
        return False
    losses = (level, peak.loss_level, peak.loss)
    if not peak.is_signed and level > SHARED.doubled_factor * peak.loss_level:
        return False
    now, before, highest = losses if peak.is_signed or min(losses) <= 0 else map(math.log, losses)
    return now - before <= SHARED.minor_ratio * (highest - before)


def _observations(source: Source, since_step: int, policy: LossSpikePolicy) -> list[Observation]:
    rows = source.rows(
        """
        WITH own AS (
            SELECT *, row_number() OVER (PARTITION BY attempt, rank, step ORDER BY start_ns NULLS LAST) AS execution
            FROM steps WHERE step >= ? AND loss IS NOT NULL
        ), ends AS (SELECT attempt, count(DISTINCT rank) AS num_ranks, max(step) AS newest FROM own GROUP BY attempt)
        SELECT attempt, step, CASE WHEN min(loss) = max(loss) THEN min(loss) ELSE avg(loss) END,
               arg_min(grad_norm, rank), arg_min(lr, rank), arg_min(batch_index, rank), arg_min(committed, rank)
        FROM own JOIN ends USING (attempt) GROUP BY attempt, step, execution, num_ranks, newest
        HAVING count(*) = num_ranks OR step <= newest - ? ORDER BY attempt, arg_min(start_ns, rank) NULLS LAST, step
        """,
        [since_step, policy.late_steps],
    )
    return list(_with_executions(rows))


def _highest_first_loss(source: Source, since_step: int) -> float:
    """Highest loss of the run's first steps before `since_step`; 0 if none is known."""
    ((highest,),) = source.rows(
        """
        SELECT max(loss) FROM (SELECT loss FROM steps WHERE step < ? AND loss IS NOT NULL AND isfinite(loss)
                               ORDER BY attempt, start_ns NULLS LAST, step LIMIT ?)
        """,
        [since_step, SHARED.history],
    )
    return float(highest or 0.0)


def _with_executions(rows: Iterable[tuple[Any, ...]]) -> Iterable[Observation]:
    seen: dict[tuple[int, int], int] = {}
    for attempt, step, loss, grad_norm, lr, batch_index, committed in rows:
        execution = seen.get((attempt, step), 0)
        seen[attempt, step] = execution + 1
        norm = math.nan if grad_norm is None else float(grad_norm)
        yield Observation(attempt, step, float(loss), norm, lr, batch_index, committed, execution)


def _finding(observations: Sequence[Observation], spike: Spike, log: EventLog) -> Finding:
    worst = max(spike.verdicts, key=lambda verdict: verdict.loss_z)
    first, last = observations[spike.indices[0]], observations[spike.indices[-1]]
    response = respond(
        log, attempt=first.attempt, step=first.step, execution=first.execution, committed=first.committed
    )
    replayed = find_replay(log, attempt=first.attempt, step=first.step, execution=first.execution)
    if replayed is not None and spike.cause == "batch" and replayed.replay_verdict in ("transient", "weights"):
        spike = replace(spike, cause=replayed.replay_verdict)
    batches = [observations[i].batch_index for i in spike.indices]
    known = [batch for batch in batches if batch is not None]
    return Finding(
        analyzer="spike",
        kind="loss_spike",
        severity="critical" if spike.cause == "divergence" and not response.handled else "warning",
        status="fired",
        summary=_summary(first, last, worst, spike, response, replayed),
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
            **({"ongoing": False} if spike.is_over else {}),
            **(_evidence_after(spike.after) if spike.has_lasted else {}),
            "batch_indices": known[:64],
            **response.evidence(),
            **(replayed.evidence() if replayed else {}),
        },
        advice=f"loss-spike-{spike.cause}",
        attempt=first.attempt,
    )


def _summary(
    first: Observation, last: Observation, worst: SpikeVerdict, spike: Spike, response: Response,
    replayed: ReplayResult | None,
) -> str:  # fmt: skip
    cause, after = spike.cause, spike.after if spike.has_lasted else None
    is_over = after is not None and spike.is_over
    where = f"over steps {first.step} to {last.step}"
    if is_over or first.step == last.step:
        where = f"at step {first.step}"
    share = "" if worst.is_signed else f" ({rise_text(worst.loss_rise_ratio)})"
    why = f" on batch {first.batch_index}" if cause == "batch" and first.batch_index is not None else ""
    if cause == "learning_rate":
        why = " after the learning rate jumped" + (f" to {first.lr:.3g}" if first.lr else "")
    elif cause == "divergence":
        why = " and stayed high"
    if is_over and after is not None:
        why += (
            f" and was back below its earlier level by step {after.back_at}"
            if after.back_at is not None
            else f" and had fallen back to {loss_text(after.last_loss)} by step {after.last_step}"
        )
    replay_text = "" if replayed is None else f" {replayed.text()}"
    rise = f"Loss rose from {loss_text(worst.loss_level)} to {loss_text(worst.loss)}"
    return f"{rise}{share} {where}{why}.{replay_text} {response.text}"


def _evidence_after(after: After | None) -> dict[str, Any]:
    if after is None or not math.isfinite(after.last_loss):
        return {}
    if after.back_at is not None:
        return {"recovered_step": after.back_at}
    return {"loss_after": round(after.last_loss, 5)}


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
