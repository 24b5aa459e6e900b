"""The newest report of each finding: `watch` reports a finding again when it changes, and when it is over.

for finding in newest_reports(reports): ...     # only the newest report of each finding
closed_findings(findings, reports, newest_attempt=1)    # {"rank_lost-0-r1": "the run continued as attempt 1"}
may_last("straggler")                           # True: it is open until its report with status `ok`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from analyzers.finding import Finding
from analyzers.kinds import KINDS
from analyzers.plugin_calls.named import plugin_name, with_note
from analyzers.run.records.event_log import parsed_detail
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = [
    "closed_findings", "is_same_finding", "may_last", "newest_reports", "recorded_findings", "reported_findings",
    "why_closed",
]  # fmt: skip
MAX_REPORTS = 500
"""Maximum number of newest reports that are read."""
MAX_RECORDED = 2_000
"""The same maximum for findings of plug-ins, which may report many."""


def reported_findings(source: Source) -> list[Finding]:
    """Findings that `watch` reported live, newest first; events that hold no finding are skipped."""
    reported = (Finding.of_event(event) for event in _finding_events(source, MAX_REPORTS))
    return [finding for finding in reported if finding is not None]


def _finding_events(source: Source, limit: int) -> list[dict[str, Any]]:
    """The newest `finding` events, newest first."""
    if not source.has("events"):
        return []
    rows = source.rows(
        "SELECT detail FROM events WHERE kind = ? ORDER BY wall_ns DESC LIMIT ?", [event_kinds.FINDING, limit]
    )
    return [parsed_detail(detail) for (detail,) in rows]


def newest_reports(reports: Iterable[Finding]) -> list[Finding]:
    """The newest report of each finding; `reports` are ordered by time, the newest first."""
    newest: dict[tuple[object, ...], Finding] = {}
    for finding in reports:
        newest.setdefault(finding.identity, finding)
    return list(newest.values())


def may_last(kind: str) -> bool:
    """Return True if a finding of the kind stays open until it is reported as over, and False if it is a single
    incident."""
    found = KINDS.get(kind)
    return found is not None and found.may_last


def why_closed(finding: Finding, newest_attempt: int | None) -> str:
    """Return why a finding is closed, by its own evidence; empty if it is open."""
    if finding.attempt is not None and newest_attempt is not None and finding.attempt < newest_attempt:
        return f"the run continued as attempt {newest_attempt}"
    if finding.evidence.get("restored_step") is not None:
        return "recovered"
    if finding.evidence.get("update_skipped") is True:
        return "the step was refused"
    return "over" if finding.evidence.get("ongoing") is False else ""


def closed_findings(
    findings: Sequence[Finding], reports: Iterable[Finding], *, newest_attempt: int | None
) -> dict[str, str]:
    """{id: why it is closed}, by the finding's own evidence or by what `watch` reported (the newest first)."""
    ended = [report for report in newest_reports(reports) if report.status == "ok"]
    found = {finding.id: "over" for finding in findings if any(is_same_finding(finding, report) for report in ended)}
    return found | {finding.id: why for finding in findings if (why := why_closed(finding, newest_attempt))}


def is_same_finding(finding: Finding, report: Finding) -> bool:
    """Return True if both are the same finding. An event has an attempt even if its finding has none."""
    if finding.kind != report.kind or (
        None not in (finding.attempt, report.attempt) and finding.attempt != report.attempt
    ):
        return False
    if replace(finding, attempt=None).identity == replace(report, attempt=None).identity:
        return True
    # The report may state a later start of the same incident, because a live analysis reads only the newest steps.
    if finding.first_step is None or report.first_step is None or finding.ranks != report.ranks:
        return False
    return finding.first_step <= report.first_step <= (finding.last_step or finding.first_step)


def recorded_findings(source: Source) -> list[Finding]:
    """The newest report of each live finding of a kind that is unknown here. A run may be read on a machine that lacks
    the plug-ins with which it was recorded. The findings of these plug-ins must not be lost. A finding that was over
    before the run's end has `ongoing` = False in its evidence.
    """
    found: dict[str, Finding] = {}
    over: set[str] = set()
    for event in _finding_events(source, MAX_RECORDED):
        name, kind = str(event.get("id")), str(event.get("finding_kind"))
        if name in found or kind in KINDS:
            continue
        finding = Finding.of_event(event)
        if finding is None:
            continue
        if finding.status == "ok":
            over.add(name)
        elif finding.status in ("fired", "suspect"):
            found[name] = _marked(finding, is_over=name in over)
    return list(found.values())


def _marked(finding: Finding, *, is_over: bool) -> Finding:
    plugin = plugin_name(finding)
    by = (
        f"plug-in {plugin}, which is not installed here"
        if plugin
        else "plug-in or version of Rankscope that is not installed here"
    )
    evidence: dict[str, Any] = {**finding.evidence, **({"ongoing": False} if is_over else {})}
    return replace(
        finding,
        summary=with_note(finding.summary, f"recorded live by {by}" if plugin else f"recorded live by a {by}"),
        evidence=evidence,
    )
