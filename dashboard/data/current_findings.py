"""The findings of a run as the pages list them: the diagnosis, and what `watch` has reported since it was made.

    known = current_findings(diagnosis, reported_findings(store), newest_attempt=1)
    known.findings                                # open ones first, the worst on top
    known.closed.get("rank_lost-0-r1")            # "the run continued as attempt 1"; None: it is open
    found = pick(known.findings, "straggler-0-r3")

A diagnosis of a live run is some seconds old; `watch` reports within one. What it reported and the diagnosis does not
have is added, and nothing is judged here. A finding is closed when the run has recovered from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from analyzers.diagnose import Diagnosis, reading_order
from analyzers.finding import Finding
from analyzers.run.open_findings import newest_reports, why_closed

__all__ = ["CurrentFindings", "current_findings", "pick"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentFindings:
    """`findings`: fired and suspected ones in the order of reading; `closed`: id -> why it is closed."""

    findings: list[Finding] = field(default_factory=list)
    closed: Mapping[str, str] = field(default_factory=dict)


def current_findings(
    diagnosis: Diagnosis | None, reports: Sequence[Finding], *, newest_attempt: int | None = None
) -> CurrentFindings:
    """All of them, open ones first, in the order of the verdict; `reports` by `watch`, the newest first."""
    found = list(diagnosis.fired) if diagnosis is not None else []
    closed: dict[str, str] = {}
    for report in newest_reports(reports):
        same = [finding for finding in found if _same(finding, report)]
        if report.status == "ok":
            closed |= {finding.id: "over" for finding in same}
        elif not same and report.status in ("fired", "suspect"):
            found.append(report)
    closed |= {finding.id: why for finding in found if (why := why_closed(finding, newest_attempt))}
    found.sort(key=lambda finding: (finding.id in closed, reading_order(finding)))
    return CurrentFindings(findings=found, closed=closed)


def pick(findings: Sequence[Finding], finding_id: str) -> Finding | None:
    """The finding of that id, also as an older version wrote it; None if the run has none."""
    return next((finding for finding in findings if finding_id in (finding.id, finding.id_before_schema_2)), None)


def _same(finding: Finding, report: Finding) -> bool:
    """Return True if both are the same finding. An event has an attempt even if its finding has none."""
    if finding.kind != report.kind or (
        None not in (finding.attempt, report.attempt) and finding.attempt != report.attempt
    ):
        return False
    if replace(finding, attempt=None).identity == replace(report, attempt=None).identity:
        return True
    # A live analysis reads the newest steps alone, and may have seen a long incident begin within them.
    if finding.first_step is None or report.first_step is None or finding.ranks != report.ranks:
        return False
    return finding.first_step <= report.first_step <= (finding.last_step or finding.first_step)
