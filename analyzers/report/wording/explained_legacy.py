"""Explanations of kinds whose package has no `explain` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from analyzers.finding import Finding

__all__ = ["next_step", "why"]


def why(finding: Finding) -> str:
    """The evidence of a finding: its own summary."""
    return finding.summary


def next_step(_: Finding) -> str:
    """What to do: the runbook has it."""
    return ""
