"""Explanations of kinds whose package has no `explain` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from analyzers.finding import Finding

__all__ = ["next_step", "why"]


def why(finding: Finding) -> str:
    """What proves a finding, in one line."""
    numbers = finding.evidence
    match finding.kind:
        case "stage_imbalance":
            work = ", ".join(f"{value:.3g}" for value in numbers.get("work_ms_by_coordinate") or [])
            return f"milliseconds of work a step by pipeline coordinate: {work}"
    return finding.summary


def next_step(finding: Finding) -> str:
    """What to do, and where more of it stands."""
    advice = {
        "stage_imbalance": "give that stage fewer layers (parallel.stage_costs)",
    }.get(finding.kind, "")
    return advice
