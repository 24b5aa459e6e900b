"""Deaths and hangs of a played run, each with plain sentences."""

from __future__ import annotations

from pathlib import Path

from analyzers.deaths.analyze import lost_ranks
from analyzers.finding import Finding
from analyzers.hangs.analyze import hangs
from analyzers.report.wording.explained import next_step, why
from analyzers.run.policy import StallPolicy
from analyzers.scope import Scope
from analyzers.source import Source
from tests.sentences import assert_plain

__all__ = ["checked", "judged_hangs", "judged_losses"]


def checked(findings: list[Finding]) -> list[Finding]:
    """The findings, whose sentences are plain."""
    for finding in findings:
        assert_plain(finding.summary)
        if finding.status != "insufficient_data":  # which has no evidence
            assert_plain(why(finding))
            assert_plain(next_step(finding))
    return findings


def judged_hangs(
    source: Source, policy: StallPolicy, now_ns: int | None = None, stacks_dir: Path | None = None
) -> list[Finding]:
    return checked(hangs(source, Scope(now_ns=now_ns, stacks_dir=stacks_dir), policy))


def judged_losses(source: Source, policy: StallPolicy, now_ns: int | None = None) -> list[Finding]:
    return checked(lost_ranks(source, Scope(now_ns=now_ns), policy))
