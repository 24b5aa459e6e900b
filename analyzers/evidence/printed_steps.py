"""Apply the analyses of recorded runs to the steps that a trainer printed, as far as a log allows.

findings = printed_step_findings(store, findings_so_far, steps)

A printed step has a duration, and a loss that rank 0 printed for all ranks. It has no phases and usually no start time.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from statistics import median
from typing import Any

import numpy as np

from analyzers.data.analyze import data_bound
from analyzers.data.policy import DataPolicy
from analyzers.diagnose import failed_check
from analyzers.evidence.printed_trends import climbing_loss, growing_duration
from analyzers.finding import Finding, evidence_of
from analyzers.numerics.loss.divergence import divergence
from analyzers.numerics.loss.loss_spike import loss_spikes
from analyzers.numerics.loss.printed_values import exhausted_scale, nonfinite, skipped_steps
from analyzers.numerics.policy import LossSpikePolicy
from analyzers.policy import SHARED
from analyzers.robust import others_median
from analyzers.scope import Scope
from analyzers.source import Source
from analyzers.stragglers.onsets.periodic_steps import periodic_slow_steps
from analyzers.stragglers.policy import ThroughputPolicy
from analyzers.stragglers.throughput import throughput_drops
from analyzers.wording import loss_text, number

__all__ = ["can_be_judged", "printed_step_findings"]

THROUGHPUT = ThroughputPolicy(block=5, min_blocks=4, skip_first=3, min_rise_ratio=0.25)
"""Policy for printed durations. Blocks are shorter, because a line is often the mean of several steps. The rise must be
larger, because a log has no phases to confirm a slowdown."""
FEW_LINES = replace(THROUGHPUT, block=3)
"""Policy with smaller blocks, for a log with too few lines for blocks of the usual size."""
MEANS = replace(THROUGHPUT, block=1, min_blocks=2, skip_first=1, min_rise_ratio=0.5)
"""Policy for lines that each print the mean over tens of steps. One line is a block, and two lines cover as many steps
as the blocks of a recorded run.
"""
DATA = DataPolicy(warm_up_steps=1, min_steps=8, block_steps=2, share_ratio=0.3)
DATA_OF_MEANS = replace(DATA, min_steps=2, block_steps=1)
"""Data policy for lines that each print the mean over tens of steps. Two such lines cover more steps than are needed to
recognise periodic waits."""
_NO_RESPONSE = (" No action was taken.", " No response is recorded.")
_STEP_NUMBER = re.compile(r"\bstep(s?) (?=\d)")
MIN_STEPS = 2 * SHARED.min_steps
"""Minimum number of steps that all ranks printed, so that half of them may be before the onset."""


def can_be_judged(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the steps have a value that an analysis judges: a loss, a norm, or durations of a few blocks."""
    if any(row.get("loss") is not None or row.get("grad_norm") is not None for row in steps):
        return True
    timed = sum(row.get("duration_ns") is not None for row in steps)
    return timed >= FEW_LINES.skip_first + FEW_LINES.block * FEW_LINES.min_blocks


def printed_step_findings(
    source: Source, known: Sequence[Finding], steps: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """Findings of the analyses that need only the loss and duration of steps."""
    if not steps:
        return []
    are_counted = all(row.get("is_counted") for row in steps)
    name = "printed line" if are_counted else "iteration" if _iterations_per_step(steps) > 1 else "step"
    findings = (
        [] if any(one.kind == "non_finite" for one in known) else [_of_log(one, name) for one in nonfinite(steps)]
    )
    checks: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
        (
            "loss_spike",
            lambda: (
                _rises([*loss_spikes(source, Scope()), *divergence(source, Scope())], steps) or climbing_loss(steps)
            ),
        ),
        ("non_finite", lambda: [] if findings or known else skipped_steps(steps)),
        (
            "non_finite",
            lambda: [] if any(one.kind == "non_finite" for one in (*findings, *known)) else exhausted_scale(steps),
        ),
        ("throughput", lambda: _by_rate(_slower(source, steps), steps)),
        ("straggler", lambda: slow_printed_rank(steps)),
        ("data_bound", lambda: data_bound(source, Scope(), DATA_OF_MEANS if _are_means(steps) else DATA)),
    )
    for kind, check in checks:
        try:
            findings += [_of_log(one, name) for one in check() if one.status in ("fired", "suspect", "advice")]
        except Exception as error:  # lines of a log may lack any column
            findings.append(failed_check(kind, error, "log"))
    return findings


def _of_log(finding: Finding, name: str = "step") -> Finding:
    """Remove statements that need a run's records. `name`: what a step number counts, such as an iteration."""
    summary = finding.summary if name == "step" else _STEP_NUMBER.sub(rf"{name}\1 ", finding.summary)
    for text in _NO_RESPONSE:
        summary = summary.replace(text, "")
    return replace(finding, summary=summary, evidence={**finding.evidence, "printed": True})


def _iterations_per_step(steps: Sequence[Mapping[str, Any]]) -> float:
    """Number of iterations per optimizer step if the log numbers iterations; else 1."""
    last = max(steps, key=lambda row: row["step"])
    return last["step"] / last["of_step"] if last.get("of_step") else 1.0


def _by_rate(findings: Sequence[Finding], steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Reword findings on a log that prints throughput but no durations: only relative durations are known."""
    if not any(row.get("is_relative") for row in steps):
        return list(findings)
    return [
        replace(
            one,
            summary=f"Training has been slower since step {one.first_step}: by the printed throughput a step takes "
            f"{one.evidence.get('factor_ratio'):.2f}x as long.",
            evidence={"factor_ratio": one.evidence.get("factor_ratio")},
            cost_s=None,
        )
        for one in findings
        if one.cause != "periodic"
    ]


def _rises(found: Sequence[Finding], steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Merge the findings of each training, since a file may contain several (folds, trials)."""
    starts = sorted({row["step"] for row in steps if row.get("begins")})
    training_of = partial(bisect_right, starts)
    parts = groupby(sorted(steps, key=lambda row: row["step"]), lambda row: training_of(row["step"]))
    return [
        finding
        for training, rows in parts
        for finding in _one_rise([one for one in found if training_of(one.first_step or 0) == training], list(rows))
    ]


def _one_rise(found: Sequence[Finding], steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Merge the spikes of one continuous rise of the loss into one finding. `steps`: of one training, in order."""
    with_loss = [row for row in steps if row.get("loss") is not None]
    numbers, last_step = [row["step"] for row in with_loss], steps[-1]["step"]
    highest = list(accumulate((row["loss"] for row in with_loss), max))
    num_before = [bisect_left(numbers, one.first_step or 0) for one in found]
    slight = [
        one
        for one, num in zip(found, num_before, strict=True)
        if _is_slight(one, last_step, highest[num - 1] if num else None)
    ]
    fired = [one for one in found if one.status == "fired" and one not in slight]
    if slight and not fired:
        return [_noted(slight)]
    spikes = [one for one in fired if one.kind == "loss_spike"]
    if len(spikes) <= 1:
        return fired
    first, last = spikes[0], max(spikes, key=lambda one: one.last_step or 0)
    losses = [float(row["loss"]) for row in with_loss]
    end = median(losses[-max(3, len(losses) // 50) :])
    level = float(evidence_of(first).get("loss_before") or 0)
    if level > 0 and not end <= LossSpikePolicy().stayed_ratio * level:
        num = sum(evidence_of(one).get("num_steps") or 1 for one in spikes)
        return [
            replace(
                first,
                cause="divergence",
                severity="critical",
                last_step=last.last_step,
                advice="loss-spike-divergence",
                summary=f"The loss diverged: from {loss_text(level)} at step {first.first_step} to {loss_text(end)} at "
                f"the end of the log, with {num} steps far above those before them.",
            )
        ]
    if len(spikes) > SHARED.min_times:  # so many spikes mean that the loss is noisy: report one finding
        worst = max(spikes, key=lambda one: float(evidence_of(one).get("loss_z") or 0))
        more = f" It is the largest of {len(spikes)} spikes between steps {first.first_step} and {last.last_step}."
        return [replace(worst, summary=_of_log(worst).summary + more)]
    return spikes


def _is_slight(one: Finding, last_step: int, highest_before: float | None) -> bool:
    """Return True for a temporary rise of the loss that is tiny, or moderate and on one line only. A rise is not slight
    if the finding also has a gradient norm, because the norm rose, too.
    """
    facts = evidence_of(one)
    rise, sigmas = facts.get("loss_rise_ratio"), facts.get("loss_z") or 0.0
    if one.kind != "loss_spike" or one.cause != "batch" or one.status != "fired" or rise is None:
        return False
    if facts.get("grad_norm") is not None or (one.last_step or 0) >= last_step:
        return False
    before, peak = float(facts["loss_before"]), float(facts["loss"])
    fall = 0.0 if highest_before is None else highest_before - before
    if peak - before < SHARED.min_change_ratio * fall:  # a small share of the loss's fall: the model memorises
        return True
    limits = LossSpikePolicy().detector
    is_clear = rise >= limits.alone_rise_ratio or (sigmas >= limits.alone_z and rise >= limits.alone_z_rise_ratio)
    return facts.get("num_steps") == 1 and not is_clear


def _noted(slight: Sequence[Finding]) -> Finding:
    """Return advice that mentions the largest of the slight rises."""
    worst = max(slight, key=lambda one: float(evidence_of(one)["loss_rise_ratio"]))
    text = f"{_of_log(worst).summary} It did not last: a hard batch, or noise."
    if len(slight) > 1:
        text += f" {len(slight)} similar rises between steps {slight[0].first_step} and {slight[-1].first_step}."
    return replace(worst, status="advice", severity="info", summary=text)


def _slower(source: Source, steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    blocks = (THROUGHPUT, FEW_LINES, MEANS) if _are_means(steps) else (THROUGHPUT, FEW_LINES)
    drops = next((found for policy in blocks if (found := throughput_drops(source, Scope(), policy))), [])
    drops = drops or growing_duration(steps, THROUGHPUT)
    return drops or [_with_rhythm(one, steps) for one in periodic_slow_steps(source, Scope())]


def _are_means(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if lines that are many steps apart print a measured speed or duration, not the time since the
    previous line."""
    timed = [row for row in steps if row.get("duration_ns")]
    if len(timed) < 2 or any(row.get("is_between") or row.get("is_of_bar") for row in steps):
        return False
    distances: list[float] = [after["step"] - before["step"] for before, after in pairwise(timed)]
    if any(row.get("is_counted") for row in steps):  # lines are numbered, not steps: take the distances from the times
        if any(row["start_ns"] is None for row in timed):
            return False
        ends = [row["start_ns"] + row["duration_ns"] for row in timed]
        distances = [(end - ends[at]) / timed[at + 1]["duration_ns"] for at, end in enumerate(ends[1:])]
    usual = ThroughputPolicy()
    return MEANS.min_blocks * float(median(distances)) >= usual.block * usual.min_blocks


def _with_rhythm(one: Finding, steps: Sequence[Mapping[str, Any]]) -> Finding:
    """Turn a finding of periodic slow steps into mere advice if something harmless explains them: gradient
    accumulation, epochs, another progress bar, or evaluations and saves between two printed lines."""
    every, cost = evidence_of(one)["every_steps"], evidence_of(one)["cost_ratio"]
    timed = [row for row in steps if row.get("duration_ns") is not None]
    if abs(every - _iterations_per_step(steps)) < 0.5:
        why = "That is once per optimizer step; the other steps accumulate gradients."
    elif 2 * sum(bool(row.get("is_after_other")) for row in steps) >= evidence_of(one)["times"]:
        why = "Another progress bar runs before most of them, so they include its work, such as an evaluation."
    elif timed and all(row.get("is_between") for row in timed):
        why = "It is the time between lines, which includes evaluations, checkpoints and the start of epochs."
    elif any(
        abs(every - (row.get("per_epoch") or 0)) <= 1 and (cost < SHARED.cost_ratio or row.get("is_of_bar"))
        for row in timed
    ):  # a progress bar computes its rate anew in each epoch, so any cost counts there
        why = "That is once per epoch: loader workers are restarted (persistent_workers=True keeps them)."
    else:
        return one
    return replace(one, status="advice", severity="info", summary=f"{one.summary} {why}")


def slow_printed_rank(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report the rank that is `SHARED.equal_ratio` slower than the median of the others in most steps from an onset on.

    Ranks that wait for each other in every step print the same duration, so a rank that differs measures its own work.
    The lines do not show which part of the step is slow.
    """
    by_step: dict[int, dict[int, float]] = defaultdict(dict)
    for row in steps:
        if row.get("duration_ns") and not row.get("is_between") and not row.get("is_relative"):
            by_step[row["step"]][row["rank"]] = row["duration_ns"] / 1e6
    num_ranks = max((len(durations) for durations in by_step.values()), default=0)
    whole = {step: each for step, each in sorted(by_step.items()) if len(each) == num_ranks >= SHARED.min_times}
    if len(whole) < MIN_STEPS:
        return []
    ranks, whole_steps = sorted(next(iter(whole.values()))), list(whole)
    took_ms = np.array([[durations[rank] for rank in ranks] for durations in whole.values()])
    others_ms = others_median(took_ms.T).T
    ratios = took_ms / others_ms
    newest = np.median(ratios[-MIN_STEPS:], axis=0)
    slow = int(np.argmax(newest))
    if newest[slow] < 1 + SHARED.equal_ratio or np.sum(newest >= 1 + SHARED.equal_ratio) > 1:
        return []
    is_slow = ratios[:, slow] > 1 + (newest[slow] - 1) / 2
    num_slow = np.concatenate([[0], np.cumsum(is_slow)])
    # The onset is the step that best separates usual steps before it from slow steps after it.
    num_agreeing = (num_slow[-1] - num_slow) + (np.arange(len(num_slow)) - num_slow)
    first = int(np.argmax(num_agreeing[: len(is_slow) - MIN_STEPS + 1]))
    if np.mean(is_slow[first:]) < SHARED.agreement_ratio:
        return []
    own_ms, usual_ms = float(np.median(took_ms[first:, slow])), float(np.median(others_ms[first:, slow]))
    rank, since = ranks[slow], whole_steps[first]
    return [
        Finding(
            analyzer="straggler",
            kind="straggler",
            severity="warning",
            status="suspect",
            ranks=(rank,),
            first_step=since,
            last_step=whole_steps[-1],
            cause="unknown",
            summary=f"Rank {rank} prints {own_ms / usual_ms:.2f}x the step time of the other {num_ranks - 1} ranks "
            f"since step {since}: {number(own_ms, 4)} instead of {number(usual_ms, 4)} ms. The lines do not show in "
            "which part of the step.",
            evidence={
                "phase_factors_ratio": {"whole_step": round(own_ms / usual_ms, 4)},
                "excess_ms": round(own_ms - usual_ms, 3),
                "basis": f"{len(whole)} steps of {num_ranks} ranks",
            },
            advice="straggler-compute",
        )
    ]
