"""Evidence and next step of findings about pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from analyzers.finding import Finding
from analyzers.wording import listed, number, percent

__all__ = ["NEXT", "WHY"]


def _bubble(finding: Finding) -> str:
    of = finding.evidence
    return (
        f"Ranks are idle for {percent(of.get('idle_ratio'))} of {number(of.get('pipeline_ms'))} ms per step, in "
        f"{of.get('num_steps_measured', '?')} steps."
    )


def _imbalance(finding: Finding) -> str:
    work = [f"{number(value)} ms" for value in finding.evidence.get("work_ms_by_coordinate") or []]
    return f"Work per step of the pipeline stages: {listed(work)}."


WHY: Mapping[str, Callable[[Finding], str]] = {"bubble": _bubble, "stage_imbalance": _imbalance}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "bubble": lambda _: "Use more microbatches or an interleaved schedule, or balance the stages.",
    "stage_imbalance": lambda _: "Give that stage fewer layers (parallel.stage_costs).",
}
