"""Evidence and next step of findings about pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from analyzers.finding import Finding, evidence_of
from analyzers.wording import is_number, listed, number, percent

__all__ = ["NEXT", "WHY"]


def _bubble(finding: Finding) -> str:
    facts = finding.evidence
    return (
        f"Ranks are idle for {percent(facts.get('idle_ratio'))} of {number(facts.get('pipeline_ms'))} ms per step, in "
        f"{facts.get('num_steps_measured', '?')} steps."
    )


def _imbalance(finding: Finding) -> str:
    work = [f"{number(value)} ms" for value in evidence_of(finding).get("work_ms_by_coordinate") or []]
    return f"Work per step of the pipeline stages: {listed(work)}."


def _next_bubble(finding: Finding) -> str:
    """Change that would shorten the bubble most, with its size: another cut of the stages, or more microbatches."""
    facts = finding.evidence
    names = ("excess_imbalance_ratio", "idle_expected_ratio", "num_microbatches")
    uneven, expected, count = (cast("Any", facts.get(name)) for name in names)
    if facts.get("heaviest_stage") is not None and is_number(uneven) and is_number(expected) and uneven >= expected / 2:
        stage = facts["heaviest_stage"]
        return f"Move {percent(facts.get('surplus_ratio'))} of stage {stage} away (parallel.stage_costs)."
    if not is_number(expected) or not is_number(count) or facts.get("idle_expected_from") != "formula":
        return "Use more microbatches or an interleaved schedule, or balance the stages."
    # With m microbatches the idle share is a / (m + a), where a depends on the schedule and the stages.
    doubled = percent(expected / (2 - expected))
    return (
        f"Use {2 * count} microbatches instead of {count} ({doubled} idle by the schedule, now {percent(expected)}), "
        "or an interleaved schedule."
    )


def _next_imbalance(finding: Finding) -> str:
    if finding.evidence.get("has_better_partition") is not False:
        return "Give that stage fewer layers (parallel.stage_costs)."
    if finding.status == "advice":
        return "Use fewer stages (parallel.pp), each with more layers."
    return "Swap the devices of two stages: if the slowness moves to the other stage, it is the device."


WHY: Mapping[str, Callable[[Finding], str]] = {"bubble": _bubble, "stage_imbalance": _imbalance}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "bubble": _next_bubble,
    "stage_imbalance": _next_imbalance,
}
