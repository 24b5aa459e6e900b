"""Runs that wait for data: share of the step time, ranks, onset, and whether the waits are steady or periodic.

    findings = data_bound(store, Scope())       # kind data_bound, cause steady | periodic | epoch_start | irregular

1. In each step, the lower median of the ranks' own loading times is used: at least half of the ranks wait that long. A
   single rank with a slow loader is a straggler and not reported here. Time in which a rank was runnable but waited for
   a core is subtracted, because on a busy machine it lengthens every phase, including loading.
2. The run is data-bound from an onset on if data takes `share_ratio` of the time from there to the end of the run.
3. Rhythm: `steady` if most steps wait. Otherwise only *starved* steps count: steps that wait much longer than the
   median step. If they are at regular distances, the cause is `periodic`: a prefetch buffer runs empty, or a shard is
   opened. If the distance is long and the first step is starved, too, the cause is `epoch_start`: workers restart with
   each epoch. If not, it is `irregular`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from analyzers.account.time_classes import TRAINING, own
from analyzers.analysis import Analysis
from analyzers.data.policy import DataPolicy
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.calls.snapshot import attempts
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.scope import Scope
from analyzers.source import READ_CALLS, Floats, Ints, Source, floats, ints, lacking
from analyzers.wording import number

__all__ = ["ANALYSES", "Rhythm", "data_bound", "padding", "rhythm"]

_WAITED = f"greatest(0, {own('data')} - coalesce(run_delay_ns, 0))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How regularly steps wait for data; `every_steps` is 0 if the distances are not regular."""

    cause: str
    every_steps: int
    starved_steps: int


def data_bound(source: Source, scope: Scope, policy: DataPolicy | None = None) -> list[Finding]:
    """Report at most one finding per attempt."""
    policy = policy or DataPolicy()
    if absent := lacking(source, steps=("data_ns", "duration_ns")):
        return [_insufficient(not_recorded(absent), missing(absent))]
    ((recorded,),) = source.rows("SELECT max(data_ns) FROM steps WHERE duration_ns IS NOT NULL")
    if not recorded:
        return [_insufficient("steps have no data time (a span of kind `data` around the loader records it)")]
    findings: list[Finding] = []
    judged = False
    for attempt in attempts(source):
        if scope.attempt not in (None, attempt):
            continue
        step, data_ms, step_ms = _waits(source, attempt, scope.since_step, policy.warm_up_steps)
        if len(step) < policy.min_steps:
            continue
        judged = True
        begin = _onset(data_ms, step_ms, policy)
        if begin is not None:
            findings.append(_finding(source, attempt, step[begin:], data_ms[begin:], step_ms[begin:], policy))
    if not judged:
        return [_insufficient(f"it needs {policy.min_steps} finished steps after the first {policy.warm_up_steps}")]
    return findings


def rhythm(step: Ints, data_ms: Floats, step_ms: Floats, policy: DataPolicy) -> Rhythm:
    """Classify how regularly steps wait for data. Pure."""
    waits = data_ms >= policy.share_ratio * step_ms
    starved = data_ms > np.maximum(policy.heavy_factor * np.median(data_ms), policy.min_ms)
    if waits.mean() >= SHARED.agreement_ratio:
        return Rhythm(cause="steady", every_steps=0, starved_steps=int(waits.sum()))
    places = step[starved]
    # Starved steps that are next to each other count as one.
    starts = places[np.append(True, np.diff(places) > SHARED.repeats)] if len(places) else places
    gaps = np.diff(starts)
    if len(gaps) >= 2:
        gap = float(np.median(gaps))
        tolerance = max(1.0, SHARED.equal_ratio * gap)
        equal = np.abs(gaps - gap) <= tolerance
        if equal.mean() >= SHARED.agreement_ratio:
            is_at_start = starts[0] - step[0] <= tolerance or starts[0] % gap <= 1
            cause = "epoch_start" if gap >= 2 * SHARED.min_steps and is_at_start else "periodic"
            return Rhythm(cause=cause, every_steps=round(gap), starved_steps=len(places))
    return Rhythm(cause="irregular", every_steps=0, starved_steps=int(waits.sum()))


def _waits(source: Source, attempt: int, since_step: int, skip_first: int) -> tuple[Ints, Floats, Floats]:
    """Read (step, milliseconds of waiting for data, milliseconds of the step), without the first steps."""
    ((num_rows,),) = source.rows("SELECT count(*) FROM steps")
    table = source.query(
        f"""
        SELECT step, quantile_disc({_WAITED}, 0.5) / 1e6 AS data, median({TRAINING}) / 1e6 AS took
        FROM steps WHERE attempt = ? AND step >= ? AND rank >= 0 AND duration_ns IS NOT NULL AND data_ns IS NOT NULL
          AND rank % ? = 0
        GROUP BY step ORDER BY step
        """,
        [attempt, since_step, max(1, -(-num_rows // READ_CALLS))],
    )
    keep = slice(skip_first, None)
    return ints(table["step"])[keep], floats(table["data"])[keep], floats(table["took"])[keep]


def _onset(data_ms: Floats, step_ms: Floats, policy: DataPolicy) -> int | None:
    """Find the index of the step from which the run is data-bound until its end; None if it is not."""
    if _share(data_ms[-policy.min_steps :], step_ms[-policy.min_steps :]) < policy.share_ratio / 2:
        return None  # the run is no longer data-bound, or never was
    from_here = np.cumsum(data_ms[::-1])[::-1], np.cumsum(step_ms[::-1])[::-1]
    blocks = np.arange(0, len(data_ms) - policy.min_steps + 1, policy.block_steps)
    shares = from_here[0][blocks] / np.maximum(from_here[1][blocks], 1e-9)
    if not (shares >= policy.share_ratio).any():
        return None
    # The onset is the step from which the sum of (data time - half of `share_ratio` of the step time) is largest.
    excess = from_here[0] - policy.share_ratio / 2 * from_here[1]
    begin = int(np.argmax(excess[: len(data_ms) - policy.min_steps + 1]))
    mean_ms = float(data_ms[begin:].mean())
    is_bound = _share(data_ms[begin:], step_ms[begin:]) >= policy.share_ratio and mean_ms >= policy.min_ms
    return begin if is_bound else None


def _share(data_ms: Floats, step_ms: Floats) -> float:
    return float(data_ms.sum() / max(float(step_ms.sum()), 1e-9))


def _finding(source: Source, attempt: int, step: Ints, data_ms: Floats, step_ms: Floats, policy: DataPolicy) -> Finding:
    share, found = _share(data_ms, step_ms), rhythm(step, data_ms, step_ms, policy)
    first, last = int(step[0]), int(step[-1])
    rows = source.rows(
        f"""
        SELECT rank, sum({_WAITED}) / sum({TRAINING}) FROM steps
        WHERE attempt = ? AND step BETWEEN ? AND ? AND rank >= 0 AND duration_ns IS NOT NULL
          AND data_ns IS NOT NULL GROUP BY rank ORDER BY rank
        """,
        [attempt, first, last],
    )
    waiting = [rank for rank, ratio in rows if ratio is not None and ratio >= policy.share_ratio / 2]
    is_all = len(waiting) == len(rows)
    # Steps read from a log have no phases and one rank.
    is_printed = not source.rows("SELECT max(forward_ns) FROM steps")[0][0] and len(rows) == 1
    who = "The steps" if is_printed else "All ranks" if is_all else f"{len(waiting)} of {len(rows)} ranks"
    how = {
        "steady": "in nearly every step",
        "periodic": f"every {found.every_steps} steps",
        "epoch_start": f"every {found.every_steps} steps (likely the start of an epoch)",
        "irregular": f"in {found.starved_steps} of {len(step)} steps",
    }[found.cause]
    return Finding(
        analyzer="data_wait",
        kind="data_bound",
        severity="warning",
        status="fired",
        ranks=() if is_all else tuple(waiting),
        first_step=first,
        last_step=last,
        cause=found.cause,
        summary=f"{who} have waited for data {100 * share:.0f} % of the time since step {first}: "
        f"{number(float(data_ms.mean()))} of {number(float(step_ms.mean()))} ms per step, {how}.",
        evidence={
            "data_ratio": round(share, 4),
            "data_ms": round(float(data_ms.mean()), 3),
            "data_highest_ms": round(float(data_ms.max()), 3),
            "step_ms": round(float(step_ms.mean()), 3),
            "every_steps": found.every_steps or None,
            "starved_steps": found.starved_steps,
            "steps": len(step),
            "speedup_without_it_ratio": round(1 / max(1e-3, 1 - share), 3),
        },
        advice="data-bound",
        attempt=attempt,
        cost_s=round(float(data_ms.sum()) / 1e3, 3),
    )


def padding(source: Source, scope: Scope, policy: DataPolicy | None = None) -> list[Finding]:
    """Report the share of padding in the batches of an attached loop; at most one finding per attempt.

    The probes record the number of positions with 0 in an attention mask of zeros and ones as a scalar `padded_tokens`
    of each rank and step. A loop without such a mask is not judged.
    """
    policy = policy or DataPolicy()
    if lacking(source, steps=("tokens",), scalars=("name", "value")):
        return []
    findings = []
    for attempt in attempts(source):
        if scope.attempt not in (None, attempt):
            continue
        ((first, last, steps, tokens, padded),) = source.rows(
            """
            SELECT min(step), max(step), count(DISTINCT step), sum(tokens), sum(value)
            FROM steps LEFT JOIN (FROM scalars WHERE name = 'padded_tokens') USING (attempt, rank, step)
            WHERE attempt = ? AND step >= ? AND tokens > 0
            """,
            [attempt, scope.since_step or 0],
        )
        if steps < policy.min_steps or padded is None or padded < SHARED.severe_share_ratio * tokens:
            continue
        share = padded / tokens
        findings.append(
            Finding(
                analyzer="padding",
                kind="padding",
                severity="warning",
                status="fired",
                first_step=first,
                last_step=last,
                cause="",
                summary=f"{100 * share:.0f} % of the tokens in steps {first} to {last} are padding.",
                evidence={"padded_ratio": round(share, 4), "padded_tokens": int(padded), "tokens": int(tokens)},
                advice="padding",
                attempt=attempt,
            )
        )
    return findings


_insufficient = partial(Finding.not_judged, "data_wait", "data_bound", "Data loading was not checked")


ANALYSES = (
    Analysis(kinds=("data_bound",), run=data_bound, records="compared", live="periodic"),
    Analysis(kinds=("padding",), run=padding, live="periodic"),
)
