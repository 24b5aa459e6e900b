"""Findings whose sentences were checked: summary, evidence and next step."""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step, why
from tests.sentences import assert_plain

__all__ = ["explained"]


def explained(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, after their sentences were read."""
    for finding in findings:
        assert_plain(finding.summary)
        assert_plain(why(finding))
        assert_plain(next_step(finding))
    return list(findings)
