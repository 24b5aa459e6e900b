"""Sentences on goodput, the cost of stragglers and the pipeline, the same in terminal, page and ticket.

goodput_line(diagnosis.goodput)      # "Of 40.2 s of wall time: 81 % training, 12 % exposed communication."
what_if_line(diagnosis.what_if)      # "Balanced ranks would be 1.09x faster (mean step ...)."
pipeline_line(diagnosis.findings)    # the summary of the bubble, or ""
phases_line(diagnosis.run["named_phases"])   # "Of step time: 58 % generation, ...", or "" without named phases
wall_s(diagnosis.goodput, diagnosis.run)     # 40.2: the one wall time that a report shows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyzers.account.goodput import Account
from analyzers.finding import Finding
from analyzers.whatif.what_if import WhatIf, exceeds_error
from analyzers.wording import is_number, number, percent, ranks_text

__all__ = ["bubble_of", "claims_gain", "goodput_line", "phases_line", "pipeline_line", "wall_s", "what_if_line"]


def wall_s(account: Account | None, facts: Mapping[str, Any]) -> float | None:
    """Wall time of the run in seconds: from the account of the time if there is one, otherwise from the first to the
    last recorded step."""
    seconds: Any = account.wall_s if account is not None else facts.get("wall_s")
    return float(seconds) if is_number(seconds) else None


def goodput_line(account: Account) -> str:
    """Shares of the wall time: training first if it was measured, the others by size; below 0.5 % they are left out."""
    shares = {name: value / account.wall_s for name, value in account.seconds.items()} if account.wall_s else {}
    ordered = sorted(shares, key=lambda name: (name != "training", -shares[name]))
    always_shown = "training" if account.goodput_ratio is not None else ""
    shown = [name for name in ordered if name == always_shown or shares[name] >= 0.005]
    parts = [f"{100 * shares[name]:.0f} % {account.names[name]}" for name in shown]
    return f"Of {account.wall_s:.1f} s of wall time: {', '.join(parts)}. {account.open_text}".rstrip()


def claims_gain(what_if: WhatIf) -> bool:
    """True if `what_if_line` says that balanced ranks would be faster."""
    worth = min(what_if.slowdown, what_if.gain) >= 1.01
    return worth and what_if.is_beyond_error


def what_if_line(what_if: WhatIf, findings: Sequence[Finding] = ()) -> str:
    """The cost of all differences between ranks, and their causes. A gain within the error is not claimed.

    `findings`: the findings in the same report. A note is added where the line would seem to contradict them, or to
    repeat the gain that they name.
    """
    steps = f"steps {what_if.first_step} to {what_if.last_step}"
    over = f"{steps}, error {100 * what_if.error_ratio:.1f} %"
    if what_if.withheld:
        return f"The time with balanced ranks is not predicted: {what_if.withheld}."
    if what_if.launch_delay_ratio >= 0.01:
        over += f", launch delay {100 * what_if.launch_delay_ratio:.0f} %"
    if what_if.slowdown < 1.01:
        return _with_scope(f"Balanced ranks would not be faster ({over}).", findings)
    if what_if.gain < 1.01 and exceeds_error(what_if.slowdown, what_if.error_ratio):
        little = f"Balanced ranks would gain less than 1 %: the slowest rank changes from step to step ({over})."
        if what_if.has_stages:  # the slowdown may be that of a stage, which lasts
            little = f"Balancing the ranks within each pipeline stage would gain less than 1 % ({over})."
        return _with_scope(little, findings)
    if not what_if.is_beyond_error:
        return _with_scope(f"The gain from balanced ranks is below the prediction error ({over}).", findings)
    without_ms = what_if.step_ms / what_if.gain
    mean = f"mean step {number(without_ms, 4)} ms instead of {number(what_if.step_ms, 4)} ms"
    if any(is_number(found.evidence.get("speedup_without_it_ratio")) for found in findings if found.status == "fired"):
        spread = "Spreading the extra work over all ranks, instead of removing it as in the finding, would make"
        return f"{spread} training {what_if.gain:.2f}x faster ({mean}, {over})."
    gain = f"Balanced ranks would be {what_if.gain:.2f}x faster ({mean}, {over})."
    worst, last_stage = (_of_gain(what_if, share) for share in (what_if.worst_ranks_ratio, what_if.last_stage_ratio))
    if worst >= 0.05:
        gain += f" Balancing {ranks_text(what_if.worst_ranks)} alone gives {percent(worst)} of this gain."
    if last_stage >= 0.05:
        gain += f" Balancing the last stage alone gives {percent(last_stage)}."
    return gain


_OUT_OF_SCOPE = (
    ("straggler", "communication", "Slow transfers are not part of this: the finding has their cost."),
    ("stage_imbalance", "", "Differences between pipeline stages are not part of this: see Pipeline."),
    ("straggler", "", "The straggler finding covers only its own steps."),
)
"""Kind and cause of a finding, and why the what-if shows no gain although the finding shows a slowdown."""


def _with_scope(line: str, findings: Sequence[Finding]) -> str:
    """Add a note on slowdowns that a finding names but the what-if leaves out."""
    fired = [found for found in findings if found.status in ("fired", "suspect")]
    for kind, cause, scope in _OUT_OF_SCOPE:
        if any(found.kind == kind and (not cause or found.cause == cause) for found in fired):
            return f"{line} {scope}"
    return line


def _of_gain(what_if: WhatIf, share_of_slowdown: float | None) -> float:
    """Share of the claimed gain that some ranks cause, at most 1. M_W and M_S are shares of the whole slowdown, but the
    gain is only its lasting part.
    """
    removed_ms = (share_of_slowdown or 0.0) * (what_if.step_ms - what_if.ideal_step_ms)
    gain_ms = what_if.step_ms * (1 - 1 / what_if.gain)
    return min(1.0, removed_ms / gain_ms) if gain_ms > 0 else 0.0


def bubble_of(findings: Sequence[Finding]) -> Finding | None:
    """The measurement of the pipeline's bubble; None if there was nothing to measure."""
    return next((found for found in findings if found.kind == "bubble" and found.status == "ok"), None)


def pipeline_line(findings: Sequence[Finding]) -> str:
    """The bubble, its excess over the schedule and the cause; empty if the bubble was not measured."""
    found = bubble_of(findings)
    return found.summary if found else ""


def phases_line(phases: Sequence[Mapping[str, Any]]) -> str:
    """Shares of the phases that the loop has named, including training, and the longest one; empty without named
    phases.
    """
    if not phases:
        return ""
    parts = [f"{percent(one['share_ratio'])} {one['name']}" for one in phases]
    longest = phases[0]
    return (
        f"Of step time: {', '.join(parts)}. "
        f"The slowest is {longest['name']}: {number(longest['own_ms'], 4)} ms per step."
    )
