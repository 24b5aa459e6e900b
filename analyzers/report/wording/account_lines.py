"""Sentences on goodput, the cost of stragglers and the pipeline, the same in terminal, page and ticket.

goodput_line(diagnosis.goodput)      # "81 % training, 12 % exposed communication of 40.2 s."
what_if_line(diagnosis.what_if)      # "Balanced ranks would be 1.09x faster (mean step ...)."
pipeline_line(diagnosis.findings)    # the summary of the bubble, or ""
wall_s(diagnosis.goodput, diagnosis.run)     # 40.2: the one wall time that a report shows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyzers.account.goodput import CATEGORIES, Account
from analyzers.finding import Finding
from analyzers.whatif.what_if import WhatIf, exceeds_error
from analyzers.wording import is_number, ranks_text, sentence

__all__ = ["bubble_of", "goodput_line", "pipeline_line", "wall_s", "what_if_line"]


def wall_s(account: Account | None, facts: Mapping[str, Any]) -> float | None:
    """Wall time of the run, seconds: from the account where there is one, else from first to last recorded step."""
    seconds: Any = account.wall_s if account is not None else facts.get("wall_s")
    return float(seconds) if is_number(seconds) else None


def goodput_line(account: Account) -> str:
    """Shares of the wall time, training first (unless it was not measured) and then the largest; together 100 %."""
    shares = {name: value / account.wall_s for name, value in account.seconds.items()} if account.wall_s else {}
    ordered = sorted(shares, key=lambda name: (name != "training", -shares[name]))
    always = "training" if account.goodput_ratio is not None else ""
    shown = [name for name in ordered if name == always or shares[name] >= 0.005]
    parts = [f"{100 * shares[name]:.0f} % {CATEGORIES[name]}" for name in shown]
    return f"Of {account.wall_s:.1f} s: {', '.join(parts)}."


def what_if_line(what_if: WhatIf) -> str:
    """The cost of stragglers and the ranks that cause it. No gain is claimed within the error of the replay."""
    over = f"steps {what_if.first_step} to {what_if.last_step}, error {100 * what_if.error_ratio:.1f} %"
    if what_if.withheld:
        return f"The time with balanced ranks is not predicted: {what_if.withheld}."
    if what_if.launch_delay_ratio >= 0.01:
        over += f", launch delay {100 * what_if.launch_delay_ratio:.0f} %"
    if what_if.slowdown < 1.01:
        return f"Balanced ranks would not be faster ({over})."
    if what_if.gain < 1.01 and exceeds_error(what_if.slowdown, what_if.error_ratio):
        return f"No rank is consistently slower: the slowest one changes from step to step ({over})."
    if not what_if.is_beyond_error:
        return f"The gain from balanced ranks is below the prediction error ({over})."
    steps = f"mean step {what_if.step_ms / what_if.gain:.4g} ms instead of {what_if.step_ms:.4g}, {over}"
    gain = f"Balanced ranks would be {what_if.gain:.2f}x faster ({steps})."
    worst, last_stage = what_if.worst_ranks_ratio, what_if.last_stage_ratio
    if worst is not None and worst >= 0.05:
        verb = "accounts" if len(what_if.worst_ranks) == 1 else "account"
        gain += " " + sentence(f"{ranks_text(what_if.worst_ranks)} {verb} for {_share(worst)} of the gain")
    if last_stage is not None and last_stage >= 0.05:
        gain += f" The last stage accounts for {_share(last_stage)}."
    return gain


def _share(ratio: float) -> str:
    return f"{100 * min(1.0, ratio):.0f} %"


def bubble_of(findings: Sequence[Finding]) -> Finding | None:
    """The measurement of the pipeline's bubble; None where there was nothing to measure."""
    return next((found for found in findings if found.kind == "bubble" and found.status == "ok"), None)


def pipeline_line(findings: Sequence[Finding]) -> str:
    """The bubble, its excess over the schedule and the cause; empty without a pipeline."""
    found = bubble_of(findings)
    return found.summary if found else ""
