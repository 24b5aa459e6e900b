"""Findings by their newest report: a finding is reported again when it changes, and when it is over.

for finding in newest_reports(reports): ...     # one each, whatever was reported of it before
may_last("straggler")                           # True: it is open until its report with status `ok`
"""

from __future__ import annotations

from collections.abc import Iterable

from analyzers.finding import Finding
from analyzers.kinds import KINDS

__all__ = ["may_last", "newest_reports"]


def newest_reports(reports: Iterable[Finding]) -> list[Finding]:
    """The newest report of each finding; `reports` are in their order of time, the newest first."""
    newest: dict[tuple[object, ...], Finding] = {}
    for finding in reports:
        newest.setdefault(finding.identity, finding)
    return list(newest.values())


def may_last(kind: str) -> bool:
    """Return True if a finding of the kind stays open until it is reported as over; else it is an incident."""
    found = KINDS.get(kind)
    return found is not None and found.may_last
