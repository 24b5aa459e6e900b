"""Where the time went and what stragglers cost, each in one line: for the terminal, the page and the ticket.

goodput_line(diagnosis.goodput)      # "81 % training, 12 % exposed communication, ...; of 40.2 s"
what_if_line(diagnosis.what_if)      # "112 ms a step, 93 with all ranks alike: 1.20x, rank 3 alone is 96 % of that ..."
"""

from __future__ import annotations

from ..goodput import CATEGORIES, Account
from ..whatif import WhatIf

__all__ = ["goodput_line", "what_if_line"]


def goodput_line(account: Account) -> str:
    """Shares of the wall time, the largest first; together 100 %."""
    shares = {name: value / account.wall_s for name, value in account.seconds.items()} if account.wall_s else {}
    ordered = sorted(shares, key=lambda name: (name != "training", -shares[name]))
    shown = [name for name in ordered if name == "training" or shares[name] >= 0.005]
    parts = [f"{100 * shares[name]:.0f} % {CATEGORIES[name]}" for name in shown]
    return f"{', '.join(parts)}; of {account.wall_s:.1f} s"


def what_if_line(what_if: WhatIf) -> str:
    """What stragglers cost the job, and who."""
    steps = f"of steps {what_if.first_step} to {what_if.last_step}, replayed"
    if what_if.slowdown < 1.01:
        return f"with all ranks alike nothing would be gained ({steps})"
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
