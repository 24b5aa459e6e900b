"""The simple gradient noise scale of McCandlish et al. (2018), and what it means for the batch size.

B_simple = tr(S) / |G|^2. S is the covariance of one token's gradient over the data, and G is the mean gradient. At a
batch of B_simple tokens half of a gradient is signal. Far below B_simple, doubling the batch nearly halves the number
of steps. Far above B_simple, doubling the batch gains almost nothing.

1. The gradient of each of N data ranks is a mean over b tokens. The global gradient is the mean of the N gradients, so
   a mean over B = N b tokens. Noise falls with the number of tokens: E|g_local|^2 = |G|^2 + tr(S) / b and
   E|g_global|^2 = |G|^2 + tr(S) / B.
2. These equations give unbiased estimators for each step with both norms (the paper's appendix A.1):
   tr(S) = (|g_local|^2 - |g_global|^2) / (1/b - 1/B) and |G|^2 = (B |g_global|^2 - b |g_local|^2) / (B - b).
   |g_local|^2 is the mean over the data ranks. With a pipeline, a data rank's value is the sum over its stages.
3. A step's |G|^2 is mostly noise, and a ratio of noisy values has no mean. So numerator and denominator are averaged
   separately, over the newest third of the run's samples (at least `window_samples`, at most `slow_change_steps`). The
   confidence interval of the ratio uses both variances and the covariance.

The norms are `steps.local_grad_norm` (`probes.collectives.gradients.local_gradient`) and `steps.grad_norm`, both before
clipping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from analyzers.finding import Finding
from analyzers.numerics.policy import GradientNoisePolicy
from analyzers.policy import SHARED
from analyzers.run.calls.snapshot import attempts
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.scope import Scope
from analyzers.source import Floats, Ints, Source, floats, ints, lacking

__all__ = ["Noise", "Samples", "gradient_noise", "noise_scale", "samples"]

MAX_POINTS = 10
"""Maximum number of windows over the run for which the noise scale is listed."""

_ONE_DATA_RANK = "with one data rank the local gradient is the global one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Squared gradient norms by sampled step: local (mean over the data ranks) and global. Batches in tokens."""

    step: Ints
    local_square: Floats
    global_square: Floats
    rank_tokens: float
    num_data_ranks: int

    @property
    def batch_tokens(self) -> float:
        return self.rank_tokens * self.num_data_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Averages over some samples. `scale_tokens` = `trace` / `square`; infinite if no gradient signal was seen."""

    trace: float
    """tr(S), of one token's gradient."""
    square: float
    """|G|^2."""
    trace_error: float
    square_error: float
    scale_tokens: float
    low_tokens: float
    high_tokens: float


def gradient_noise(source: Source, scope: Scope, policy: GradientNoisePolicy = GradientNoisePolicy()) -> list[Finding]:
    """One finding, of the newest attempt with enough samples."""
    if absent := lacking(source, steps=("grad_norm", "tokens", "local_grad_norm"), ranks=("rank",)):
        return [_insufficient(_why_absent(source, absent), evidence=missing(absent))]
    most = 0
    for attempt in reversed(attempts(source)):
        found = samples(source, attempt, scope.since_step) if scope.attempt in (None, attempt) else None
        if found is None:
            continue
        if found.num_data_ranks < 2:
            return [_insufficient(_ONE_DATA_RANK, attempt=attempt)]
        most = max(most, len(found.step))
        if len(found.step) >= SHARED.window_samples:
            return [_judged(found, attempt, policy)]
    return [_insufficient(f"{most} steps have local norms, {SHARED.window_samples} are needed")]


def samples(source: Source, attempt: int, since_step: int = 0) -> Samples | None:
    """Steps with the local norm of every rank that should have one; None if there are none. If a step ran
    again after a rollback, its last execution counts."""
    table = source.query(
        """
        WITH place AS (
            SELECT DISTINCT rank, coalesce(dp_replicate, rank) AS replica, coalesce(dp_shard, 0) AS shard,
                   coalesce(pp, 0) AS stage
            FROM ranks WHERE attempt = ? QUALIFY row_number() OVER (PARTITION BY rank ORDER BY wall_ns DESC) = 1
        ), own AS (
            SELECT step, rank, arg_max(local_grad_norm, start_ns) AS local, arg_max(grad_norm, start_ns) AS whole,
                   arg_max(tokens, start_ns) AS tokens
            FROM steps
            WHERE attempt = ? AND step >= ? AND local_grad_norm IS NOT NULL AND committed IS NOT FALSE
            GROUP BY step, rank
        ), data AS (
            SELECT step, replica, shard, sum(local * local) AS square, count(*) AS stages, max(whole) AS whole,
                   max(tokens) AS tokens
            FROM own JOIN place USING (rank) GROUP BY step, replica, shard
        )
        SELECT step, avg(square) AS local_square, max(whole) AS whole, max(tokens) AS tokens, count(*) AS data_ranks,
               sum(stages) AS ranks
        FROM data GROUP BY step HAVING isfinite(avg(square)) AND isfinite(max(whole)) ORDER BY step
        """,
        [attempt, attempt, since_step],
    )
    if not len(table["step"]):
        return None
    complete = ints(table["ranks"]) == ints(table["ranks"]).max()
    whole, tokens = floats(table["whole"])[complete], floats(table["tokens"])[complete]
    return Samples(
        step=ints(table["step"])[complete],
        local_square=floats(table["local_square"])[complete],
        global_square=whole**2,
        rank_tokens=float(np.median(tokens)),
        num_data_ranks=int(ints(table["data_ranks"]).max()),
    )


def noise_scale(local_square: Floats, global_square: Floats, small: float, big: float, sigmas: float = 2.0) -> Noise:
    """Averages of the two estimators, and the interval of their ratio. Batches `small` and `big` in tokens. Pure."""
    trace = (local_square - global_square) / (1.0 / small - 1.0 / big)
    square = (big * global_square - small * local_square) / (big - small)
    count = len(trace)
    errors = np.cov(np.stack((trace, square))) / count if count > 1 else np.zeros((2, 2))
    top, bottom = float(trace.mean()), float(square.mean())
    top_error, bottom_error = math.sqrt(errors[0, 0]), math.sqrt(errors[1, 1])
    low, high = _ratio_interval(top, bottom, errors, sigmas)
    return Noise(
        trace=top,
        square=bottom,
        trace_error=top_error,
        square_error=bottom_error,
        scale_tokens=top / bottom if bottom > 0 else math.inf,
        low_tokens=low,
        high_tokens=high,
    )


def _ratio_interval(top: float, bottom: float, errors: Floats, sigmas: float) -> tuple[float, float]:
    """Fieller's interval: all ratios r for which `top - r * bottom` is zero within its error. It is open to one side if
    the denominator may be zero."""
    a = bottom**2 - sigmas**2 * float(errors[1, 1])
    b = top * bottom - sigmas**2 * float(errors[0, 1])
    c = top**2 - sigmas**2 * float(errors[0, 0])
    if a <= 0:  # the signal is not significant, so the ratio has a lower but no upper bound
        edge = bottom + sigmas * math.sqrt(float(errors[1, 1]))
        return (max(0.0, top / edge) if edge > 0 else math.inf), math.inf
    root = math.sqrt(max(0.0, b * b - a * c))
    return max(0.0, (b - root) / a), (b + root) / a


def _judged(found: Samples, attempt: int, policy: GradientNoisePolicy) -> Finding:
    batch = found.batch_tokens
    newest = slice(-min(SHARED.slow_change_steps, max(SHARED.window_samples, len(found.step) // 3)), None)
    ratio = float(np.mean(found.local_square[newest]) / np.mean(found.global_square[newest]))
    if not policy.min_local_ratio <= ratio <= SHARED.doubled_factor * found.num_data_ranks:
        why = f"squared local norms are {ratio:.3g}x the global one, so the gradients were scaled in an unknown way"
        return _insufficient(why, attempt=attempt)
    noise = noise_scale(
        found.local_square[newest], found.global_square[newest], found.rank_tokens, batch, SHARED.interval_sigmas
    )
    if noise.square + SHARED.interval_sigmas * noise.square_error <= 0:
        return _insufficient("local and global norms give a mean gradient with a negative square", attempt=attempt)
    advice = "larger" if policy.far_ratio * batch <= noise.low_tokens else ""
    advice = "smaller" if batch >= policy.far_ratio * noise.high_tokens else advice
    return Finding(
        analyzer="gradient_noise",
        kind="gradient_noise",
        severity="info",
        status="advice" if advice else "ok",
        first_step=int(found.step[newest][0]),
        last_step=int(found.step[-1]),
        cause=f"{advice}_batch" if advice else "",
        summary=_summary(noise, batch, advice),
        evidence={
            "noise_scale_tokens": _rounded(noise.scale_tokens),
            "low_tokens": _rounded(noise.low_tokens),
            "high_tokens": _rounded(noise.high_tokens),
            "batch_tokens": batch,
            "signal_ratio": _signal(batch, noise.scale_tokens),
            "trace_of_covariance": noise.trace,
            "trace_standard_error": noise.trace_error,
            "square_of_mean_gradient": noise.square,
            "square_standard_error": noise.square_error,
            "local_to_global_square_ratio": round(ratio, 4),
            "data_ranks": found.num_data_ranks,
            "samples": len(found.step[newest]),
            "noise_scale_by_step": _course(found),
        },
        advice="gradient-noise",
        attempt=attempt,
    )


def _summary(noise: Noise, batch: float, advice: str) -> str:
    scale = f"at least {_text(noise.low_tokens)}"
    if not math.isinf(noise.high_tokens):
        scale = f"{_text(noise.scale_tokens)} ({_text(noise.low_tokens)} to {_text(noise.high_tokens)})"
    meaning = {
        "larger": "A larger batch would take fewer steps: doubling it nearly halves them.",
        "smaller": "A smaller batch would learn as much per step from fewer tokens.",
        "": f"{100 * _signal(batch, noise.scale_tokens):.0f} % of a step's gradient is signal.",
    }[advice]
    return f"The gradient noise scale is {scale} tokens, and a batch has {_text(batch)}. {meaning}"


def _signal(batch: float, scale: float) -> float:
    """Progress of a step / progress of a step without noise (equation 2.7 of the paper)."""
    return 0.0 if math.isinf(scale) else 1.0 / (1.0 + max(0.0, scale) / batch)


def _course(found: Samples) -> list[dict[str, float | None]]:
    """The scale in windows over the run, the oldest first."""
    count = min(MAX_POINTS, len(found.step) // SHARED.window_samples)
    course: list[dict[str, float | None]] = []
    for part in np.array_split(np.arange(len(found.step)), max(1, count)):
        local, whole = found.local_square[part], found.global_square[part]
        noise = noise_scale(local, whole, found.rank_tokens, found.batch_tokens, SHARED.interval_sigmas)
        course.append({"step": int(found.step[part[-1]]), "tokens": _rounded(noise.scale_tokens)})
    return course


def _rounded(tokens: float) -> float | None:
    """The noise scale or a bound of it, to four digits; None if it is infinite."""
    return float(f"{tokens:.4g}") if math.isfinite(tokens) else None


def _text(tokens: float) -> str:
    """The number with two digits, because the estimate is no more precise."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{float(f'{tokens / size:.2g}'):g}{unit}"
    return f"{float(f'{tokens:.2g}'):g}"


def _why_absent(source: Source, absent: list[str]) -> str:
    if absent != ["steps.local_grad_norm"]:
        return not_recorded(absent)
    ((num_ranks,),) = source.rows("SELECT count(DISTINCT rank) FROM steps WHERE rank >= 0")
    if num_ranks < 2:
        return _ONE_DATA_RANK
    return (
        "the norms of single ranks' gradients are not recorded (to record them: `probes.local_norm_interval` above 0, "
        "with recorded collectives and without tensor parallelism)"
    )


_insufficient = partial(
    Finding.not_judged, "gradient_noise", "gradient_noise", "The gradient noise scale was not measured"
)
