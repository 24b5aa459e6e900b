"""Findings whose sentences were checked: summary, evidence and next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step, why
from tests.sentences import assert_plain

__all__ = ["assert_explains", "explained"]


def explained(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, after their sentences were read."""
    for finding in findings:
        assert_plain(finding.summary)
        assert_plain(why(finding))
        assert_plain(next_step(finding))
    return list(findings)


def assert_explains(kind: str, cause: str, evidence: Mapping[str, Any], *, proof: str, remedy: str) -> None:
    """The evidence quotes its numbers and is not the verdict again, with all numbers and with none."""
    finding = Finding(
        analyzer="a", kind=kind, severity="warning", status="fired", summary="VERDICT", cause=cause, evidence=evidence,
        first_step=10, last_step=90, advice=f"{kind}-{cause}",
    )  # fmt: skip
    assert proof in why(finding)
    assert "VERDICT" not in why(finding)
    assert remedy in next_step(finding)
    assert_plain(why(finding))
    bare = Finding(analyzer="a", kind=kind, severity="warning", status="fired", summary="VERDICT", cause=cause)
    assert "VERDICT" not in why(bare), "an older event may lack a number, and is explained all the same"
