"""The findings of a run as the pages list them: the findings of the diagnosis, and those that `watch` has reported
since.

    known = current_findings(diagnosis, reported_findings(store), newest_attempt=1)
    known.findings                                # as the report orders them: open ones first
    known.closed.get("rank_lost-0-r1")            # "the run continued as attempt 1"; None: it is open
    found = pick(known.findings, "straggler-0-r3")

A diagnosis of a live run is some seconds old; `watch` reports within one second. Findings that `watch` has reported and
that the diagnosis lacks are added; nothing is judged here. A finding is closed when the run has recovered from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analyzers.diagnose import Diagnosis, reading_order
from analyzers.finding import Finding
from analyzers.run.findings.open_findings import closed_findings, is_same_finding, newest_reports
from analyzers.run.findings.past_tense import at_run_end, over

__all__ = ["CurrentFindings", "current_findings", "pick"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentFindings:
    """`findings`: fired and suspected ones in reading order; `closed`: id -> why it is closed."""

    findings: list[Finding] = field(default_factory=list)
    closed: Mapping[str, str] = field(default_factory=dict)


def current_findings(
    diagnosis: Diagnosis | None,
    reports: Sequence[Finding],
    *,
    newest_attempt: int | None = None,
    has_ended: bool = False,
) -> CurrentFindings:
    """Join the findings in the order of the verdict, open ones first. `reports`: newest first. Findings that are over
    are in the past tense. So are all findings of a run that `has_ended`.
    """
    judged = diagnosis.fired if diagnosis is not None else ()
    found = list(judged)
    for report in newest_reports(reports):
        if report.status in ("fired", "suspect") and not any(is_same_finding(finding, report) for finding in found):
            found.append(report)
    closed = closed_findings(found, reports, newest_attempt=newest_attempt)
    found.sort(key=lambda finding: (finding.id in closed, reading_order(finding)))

    def with_tense(finding: Finding) -> Finding:
        # A finding is reported when it appears. So a finding known only from its report has no last step.
        if finding.id in closed:
            return over(finding, finding.last_step if finding in judged else None)
        return at_run_end(finding) if has_ended else finding

    return CurrentFindings(findings=[with_tense(finding) for finding in found], closed=closed)


def pick(findings: Sequence[Finding], finding_id: str) -> Finding | None:
    """The finding with that id; None if the run has none."""
    return next((finding for finding in findings if finding.id == finding_id), None)
