"""Evidence and next step of findings about the cost of communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.wording import is_number, number, percent, rate_text

__all__ = ["NEXT", "WHY"]


def _exposed(finding: Finding) -> str:
    facts = finding.evidence
    return (
        f"Ranks are blocked in communication for {number(facts.get('exposed_ms'))} of {number(facts.get('step_ms'))} "
        f"ms per step, and wait for stragglers in {percent(facts.get('waiting_for_late_ratio'))} of the step."
    )


def _bandwidth(finding: Finding) -> str:
    facts = finding.evidence
    return (
        f"A transfer takes {number(facts.get('transfer_ms'))} ms, and would take "
        f"{number(facts.get('transfer_at_best_ms'))} ms at the best bandwidth of the run."
    )


def _buckets(finding: Finding) -> str:
    facts = finding.evidence
    return (
        f"Each of {number(facts.get('calls_per_step'))} calls per step takes {number(facts.get('latency_ms'))} ms "
        f"longer than its bytes need at {rate_text(facts.get('best_gb_per_s'))}."
    )


def _overlap(finding: Finding) -> str:
    """Advice on exposed calls: larger buckets help only if latency takes most of the time, not if the bytes do."""
    facts = finding.evidence
    latency_ratio: Any = facts.get("latency_ratio")
    if not is_number(latency_ratio) or latency_ratio >= SHARED.saving_ratio:
        return "Use larger buckets or prefetch, more work per rank, or fewer ranks in a group."
    speed = rate_text(facts.get("best_gb_per_s"))
    return (
        f"Calls move their bytes at {speed}, so larger buckets would save little. Check the link if it should be "
        "faster. Give each rank more work, prefetch more (FSDP), or use fewer ranks in a group."
    )


WHY: Mapping[str, Callable[[Finding], str]] = {
    "exposed_communication": _exposed,
    "low_bandwidth": _bandwidth,
    "small_buckets": _buckets,
}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "exposed_communication": _overlap,
    "low_bandwidth": lambda _: "Map the dimension with the most traffic to the fastest link.",
    "small_buckets": lambda _: "Make the gradient buckets larger.",
}
