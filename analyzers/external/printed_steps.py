"""Judge the steps that a trainer printed: losses that are not finite, spikes, divergence, slower steps.

findings = judge_steps(store, findings_so_far)
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.analysis import analyses
from analyzers.finding import Finding
from analyzers.scope import Scope
from analyzers.source import Source

__all__ = ["judge_steps"]

_KINDS = ("loss_spike", "divergence", "throughput")


def judge_steps(source: Source, known: Sequence[Finding]) -> list[Finding]:
    """Findings of the analyses that need no more than loss and duration of a step."""
    rows = source.rows("SELECT count(*) FROM steps")
    if not rows or not rows[0][0]:
        return []
    findings: list[Finding] = []
    if not any(one.kind == "non_finite" for one in known):
        findings += _nonfinite(source)
    for analysis in analyses():
        if analysis.kinds[0] in _KINDS:
            try:
                findings += [one for one in analysis.run(source, Scope()) if one.status in ("fired", "suspect")]
            except Exception as error:  # lines of a log may lack any column
                findings.append(_failed(analysis.kinds[0], error))
    return findings


def _nonfinite(source: Source) -> list[Finding]:
    rows = source.rows(
        "SELECT rank, min(step), count(*), bool_or(NOT isfinite(loss)) FROM steps "
        "WHERE NOT isfinite(loss) OR NOT isfinite(grad_norm) GROUP BY rank ORDER BY 2, 1"
    )
    if not rows:
        return []
    rank, step, count, is_loss = rows[0]
    what = "loss" if is_loss else "gradient norm"
    return [
        Finding(
            analyzer="logs",
            kind="non_finite",
            severity="critical",
            status="fired",
            first_step=step,
            last_step=step,
            cause="unknown",
            summary=f"The {what} that rank {rank} printed is not finite from step {step} on. The logs do not show "
            "where it started.",
            evidence={"basis": f"{count} printed steps have a NaN or Inf", "printed_steps": count},
            advice="non-finite-unknown",
        )
    ]


def _failed(kind: str, error: Exception) -> Finding:
    return Finding.insufficient(
        "logs", kind, f"The check for {kind} could not use the printed steps: {type(error).__name__}."
    )
