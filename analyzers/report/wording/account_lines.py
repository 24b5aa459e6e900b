"""Where the time went, what stragglers cost, what a pipeline idles: each in one line, for terminal, page and ticket.

goodput_line(diagnosis.goodput)      # "81 % training, 12 % exposed communication, ...; of 40.2 s"
what_if_line(diagnosis.what_if)      # "112 ms a step, 93 with all ranks alike: 1.20x, rank 3 alone is 96 % of that ..."
pipeline_line(diagnosis.findings)    # "the pipeline's ranks have nothing to do for 31.0 % of its time; ...", or ""
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.account.goodput import CATEGORIES, Account
from analyzers.finding import Finding
from analyzers.whatif.what_if import WhatIf

__all__ = ["bubble_of", "goodput_line", "pipeline_line", "what_if_line"]


def goodput_line(account: Account) -> str:
    """Shares of the wall time, the largest first; together 100 %."""
    shares = {name: value / account.wall_s for name, value in account.seconds.items()} if account.wall_s else {}
    ordered = sorted(shares, key=lambda name: (name != "training", -shares[name]))
    shown = [name for name in ordered if name == "training" or shares[name] >= 0.005]
    parts = [f"{100 * shares[name]:.0f} % {CATEGORIES[name]}" for name in shown]
    return f"{', '.join(parts)}; of {account.wall_s:.1f} s"


def what_if_line(what_if: WhatIf) -> str:
    """What stragglers cost the job, and who; with the replay's error, below which nothing is promised."""
    error = f"error {100 * what_if.error_ratio:.1f} %"
    steps = f"of steps {what_if.first_step} to {what_if.last_step}, replayed: {error}"
    if what_if.slowdown < 1.01:
        return f"with all ranks alike nothing would be gained ({steps})"
    if not what_if.is_beyond_error:
        return f"what would be gained with all ranks alike is less than the replay's error ({steps})"
    saved = (
        f"{what_if.step_ms:.4g} ms a step, {what_if.ideal_step_ms:.4g} with all ranks alike: {what_if.slowdown:.2f}x"
    )
    ranks = ", ".join(map(str, what_if.worst_ranks[:8])) + (", ..." if len(what_if.worst_ranks) > 8 else "")
    who = f"rank{'s' * (len(what_if.worst_ranks) > 1)} {ranks}"
    parts = [saved]
    if what_if.worst_ranks_ratio is not None and what_if.worst_ranks_ratio >= 0.05:
        parts.append(f"{who} alone is {100 * min(1.0, what_if.worst_ranks_ratio):.0f} % of that")
    if what_if.last_stage_ratio is not None and what_if.last_stage_ratio >= 0.05:
        parts.append(f"the last stage {100 * min(1.0, what_if.last_stage_ratio):.0f} %")
    return f"{', '.join(parts)} ({steps})"


def bubble_of(findings: Sequence[Finding]) -> Finding | None:
    """The measurement of the pipeline's bubble; None where there was nothing to measure."""
    return next((found for found in findings if found.kind == "bubble" and found.status == "ok"), None)


def pipeline_line(findings: Sequence[Finding]) -> str:
    """The bubble, what of it is over the schedule's own and why; empty without a pipeline."""
    found = bubble_of(findings)
    return found.summary if found else ""
