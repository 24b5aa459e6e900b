"""Logged values that contradict what the ranks recorded: a gradient norm, a mean loss, a token count.

1. For each step, the value that the lowest rank logged is divided by the recorded value: the gradient norm (over all
   shards), the mean over the ranks of the losses on which `backward` was called, or the number of token ids passed to
   the model. The logged loss is also compared with the recorded loss of the rank that logged it.
2. A contradiction is a factor that is the same in at least `min_steps` steps and that the job explains: the number of
   ranks or of micro-batches, their product, the square root of one of these, or the reciprocal of one of these. Another
   unit, a smoothed value and a loss with further terms have other factors, or changing ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.scope import Scope
from analyzers.source import Source, missing_tables
from analyzers.wording import number
from store.derived.global_norms import PARTS_SQL

__all__ = ["contradicted_values"]

_TITLES = {"grad_norm": "gradient norm", "loss": "loss", "tokens": "token count"}
_OWN_SERIES = """
SELECT s.attempt, s.step, arg_min(s.{name} / m.value, s.rank) FROM steps s
JOIN scalars m ON m.attempt = s.attempt AND m.step = s.step AND m.rank = s.rank AND m.name = 'measured_{name}'
WHERE s.{name} IS NOT NULL AND m.value > 0 AND s.attempt = coalesce(?, s.attempt) GROUP BY s.attempt, s.step
"""
_NORM = f"""
SELECT s.attempt, s.step, arg_min(s.grad_norm / g.grad_norm, s.rank) FROM steps s
JOIN ({PARTS_SQL}) g ON g.attempt = s.attempt AND g.step = s.step
WHERE s.grad_norm IS NOT NULL AND g.grad_norm > 0 AND s.attempt = coalesce(?, s.attempt) GROUP BY s.attempt, s.step
"""
_LOSSES = """
SELECT attempt, step, arg_min(loss, rank) / {ours} FROM steps
WHERE loss IS NOT NULL AND isfinite(loss) AND isfinite(local_loss) AND attempt = coalesce(?, attempt)
GROUP BY attempt, step HAVING {ours} > 0
"""
_QUERIES = (
    ("grad_norm", "scalars", _OWN_SERIES.format(name="grad_norm")),
    ("grad_norm", "scalars", _NORM),
    ("loss", "steps", _LOSSES.format(ours="avg(local_loss)")),
    ("loss", "steps", _LOSSES.format(ours="arg_min(local_loss, rank)")),
    ("tokens", "scalars", _OWN_SERIES.format(name="tokens")),
)


def contradicted_values(source: Source, scope: Scope) -> list[Finding]:
    """Findings of kind `logged_value`, one per value and attempt; none for values that are not logged."""
    if not source.has("scalars") or not source.has("steps"):
        return []
    findings: dict[tuple[str, int], Finding] = {}
    for name, table, sql in _QUERIES:
        if missing_tables(source, table):
            continue
        ratios: dict[int, dict[int, float]] = {}
        for attempt, step, ratio in source.rows(sql, [scope.attempt]):
            if ratio is not None and math.isfinite(ratio) and ratio > 0:
                ratios.setdefault(attempt, {})[step] = ratio
        for attempt, by_step in ratios.items():
            if (found := _contradiction(by_step, _factors(source, attempt))) is not None:
                findings.setdefault((name, attempt), _finding(name, attempt, by_step, *found))
    return list(findings.values())


def _factors(source: Source, attempt: int) -> Mapping[str, float]:
    """Factors that the job's layout explains: {words: factor}."""
    ((ranks,),) = source.rows("SELECT count(DISTINCT rank) FROM steps WHERE attempt = ?", [attempt])
    micro = 1
    if source.has("spans"):
        ((highest,),) = source.rows("SELECT max(microbatch) FROM spans WHERE attempt = ? AND step <= 64", [attempt])
        micro = 1 + (highest or 0)
    counts = {"the number of ranks": ranks, "the number of micro-batches": micro}
    if ranks > 1 and micro > 1:
        counts["the number of ranks times that of micro-batches"] = ranks * micro
    words = {text: float(count) for text, count in counts.items() if count > 1}
    return words | {f"the root of {text}": math.sqrt(count) for text, count in words.items()}


def _contradiction(ratios: Mapping[int, float], factors: Mapping[str, float]) -> tuple[str, float] | None:
    """Return (name of the factor, typical ratio) if nearly all ratios are the same factor or its reciprocal. Pure."""
    if len(ratios) < SHARED.min_steps or not factors:
        return None
    typical = median(ratios.values())
    near = sum(abs(ratio / typical - 1) <= SHARED.same_ratio for ratio in ratios.values())
    if near < SHARED.nearly_all_ratio * len(ratios):
        return None
    for words, factor in factors.items():
        if abs(typical / factor - 1) <= SHARED.same_ratio or abs(typical * factor - 1) <= SHARED.same_ratio:
            return words, typical
    return None


def _finding(name: str, attempt: int, ratios: Mapping[int, float], words: str, ratio: float) -> Finding:
    steps: Sequence[int] = sorted(ratios)
    size = f"{number(ratio, 3)} times" if ratio > 1 else f"1/{number(1 / ratio, 3)} of"
    return Finding(
        analyzer="logged_values",
        kind="logged_value",
        severity="warning",
        status="fired",
        first_step=steps[0],
        last_step=steps[-1],
        cause=name,
        summary=f"The {_TITLES[name]} that the loop logs is {size} what its ranks recorded: the factor is {words}.",
        evidence={"ratio": round(ratio, 5), "num_steps": len(steps), "factor": words},
        advice="logged-value",
        attempt=attempt,
    )
