"""One run in the table of runs: state, worst finding, speed, loss.

    summary = run_summary(store, state)
    summary["finding"], summary["losses"]         # "Straggler", forty values of the loss over the run

Only the newest steps, the findings that `watch` reported, and a few losses are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from analyzers.diagnose import Diagnosis, reading_order
from analyzers.finding import Finding
from analyzers.kinds import KINDS
from analyzers.run.findings.open_findings import newest_reports, reported_findings, why_closed
from analyzers.run.live.state import RunState
from analyzers.run.records.newest_steps import whole_pace
from analyzers.source import Source
from dashboard.data.sql import queries

__all__ = ["run_summary", "worst_of"]

NUM_LOSSES = 40


def run_summary(source: Source, state: RunState) -> dict[str, Any]:
    """Plain values by name; None or empty if nothing was recorded."""
    pulse = queries.pulse(source)
    pace = pulse if state.is_live else whole_pace(source)  # after the run's end, take the speed that its report states
    reports = [
        _as_of_now(one, state)
        for one in newest_reports(reported_findings(source))
        if one.status in ("fired", "suspect")
    ]
    reports.sort(key=lambda one: (bool(why_closed(one, state.attempt)), reading_order(one)))
    worst = reports[0] if reports else None
    return {
        "state": state.word, "is_live": state.is_live, "step": pulse["step"] or state.step, "last_ns": state.last_ns,
        "tokens_per_s": pace["tokens_per_s"], "step_ms": pace["step_ms"], "loss": pulse["loss"],
        "losses": _losses(source), **_worst(worst, len(reports)),
    }  # fmt: skip


def worst_of(diagnosis: Diagnosis) -> dict[str, Any]:
    """The first finding in the run's report; "none" if the run has none, but steps that were judged and no failure."""
    if fired := diagnosis.fired:
        return _worst(fired[0], len(fired))
    facts = diagnosis.run
    finding = "unknown" if facts.get("ended") == "failed" else "none" if facts.get("steps") else "not judged"
    return {"finding": finding, "severity": "", "num_findings": 0}


def _worst(finding: Finding | None, number: int) -> dict[str, Any]:
    if finding is None:
        return {"finding": "", "severity": "", "num_findings": 0}
    kind = KINDS.get(finding.kind)
    title = kind.title if kind is not None else finding.kind
    return {"finding": title, "severity": finding.severity, "num_findings": number}


def _as_of_now(report: Finding, state: RunState) -> Finding:
    """Return the report. As in the diagnosis, the end of an earlier attempt is only a warning if the run continued."""
    went_on = report.attempt is not None and state.attempt is not None and report.attempt < state.attempt
    return replace(report, severity="warning") if went_on and report.severity == "critical" else report


def _losses(source: Source) -> list[float]:
    """Medians of the loss over equal parts of the steps."""
    if queries.step_range(source) is None:
        return []
    rows = source.rows(
        f"""
        SELECT median(loss) FROM (
            SELECT step, arg_max(loss, start_ns) AS loss, ntile({NUM_LOSSES}) OVER (ORDER BY step) AS part
            FROM steps WHERE loss IS NOT NULL AND isfinite(loss) GROUP BY step)
        GROUP BY part ORDER BY part
        """
    )
    return [round(float(loss), 4) for (loss,) in rows]
