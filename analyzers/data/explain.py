"""Evidence and next step of a run that waits for data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from analyzers.finding import Finding
from analyzers.wording import number, percent

__all__ = ["NEXT", "WHY"]


def _why(finding: Finding) -> str:
    facts = finding.evidence
    return (
        f"Loading takes {percent(facts.get('data_ratio'))} of a step: {number(facts.get('data_ms'))} of "
        f"{number(facts.get('step_ms'))} ms (at most {number(facts.get('data_highest_ms'))} ms), in "
        f"{facts.get('starved_steps', '?')} of {facts.get('steps', '?')} steps."
    )


def _next(finding: Finding) -> str:
    return {
        "periodic": "Prefetch more to bridge the pause, and check what the loader does that often (a shard, a cache).",
        "epoch_start": "Keep the loader's workers between epochs (persistent_workers), or shuffle without a new scan.",
    }.get(
        finding.cause,
        "Use more loader workers or prefetch, and check the disk, the network and the cost of a sample.",
    )


def _padding(finding: Finding) -> str:
    facts = finding.evidence
    return (
        f"{facts.get('padded_tokens', 0):,} of {facts.get('tokens', 0):,} positions are masked: they take compute and "
        "memory and train nothing."
    )


def _less_padding(finding: Finding) -> str:
    return "Batch sequences of similar length (group_by_length), pad to the longest of a batch, or pack documents."


WHY: Mapping[str, Callable[[Finding], str]] = {"data_bound": _why, "padding": _padding}
NEXT: Mapping[str, Callable[[Finding], str]] = {"data_bound": _next, "padding": _less_padding}
