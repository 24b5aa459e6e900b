"""Why a finding of the machine, of checkpoints, of experts or of gradients is one: its numbers, not its sentence again.

proved(finding)     # "31 % of a step is waiting for data: 66 of 212 ms, in 140 of 150 steps"; "" for another kind
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzers.finding import Finding
from analyzers.wording import counted, is_number

__all__ = ["proved"]


def proved(finding: Finding) -> str:
    """One line from the evidence; empty where there is none of this kind."""
    numbers = finding.evidence
    make = _REASONS.get(finding.kind)
    return "" if make is None else make(finding, numbers)


def _checkpoint_failed(finding: Finding, of: Mapping[str, Any]) -> str:
    good = of.get("num_good_since")
    since = f"{counted(good, 'save')} since then went well" if good else "nothing has been saved since"
    return f"{str(of.get('reason') or 'no reason was recorded').splitlines()[0]}; {since}"


def _checkpoint_age(finding: Finding, of: Mapping[str, Any]) -> str:
    return (
        f"{of.get('age_steps', '?')} steps without a good save, {_number(of.get('lost_s'))} s of training, where one "
        f"is due every {of.get('interval_steps', '?')} steps"
    )


_REASONS = {
    "checkpoint_failed": _checkpoint_failed,
    "checkpoint_age": _checkpoint_age,
}


def _number(value: Any) -> str:
    return f"{value:.3g}" if is_number(value) else "?"
