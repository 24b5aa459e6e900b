"""Evidence and next step of advice on settings and on the start, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from analyzers.finding import Finding
from analyzers.settings.startup import PIECES
from analyzers.wording import is_number, number

__all__ = ["NEXT", "WHY"]


def _why_configuration(finding: Finding) -> str:
    measured = [f"{name} = {number(value)}" for name, value in finding.evidence.items() if is_number(value)]
    return f"Numbers of this run: {', '.join(measured[:6])}." if measured else ""


def _why_startup(finding: Finding) -> str:
    of = finding.evidence
    parts = [f"{piece} {number(of[f'{piece}_s'])} s" for piece in PIECES if f"{piece}_s" in of]
    return f"Parts of the start: {', '.join(parts).replace('first_step', 'first step')}."


WHY: Mapping[str, Callable[[Finding], str]] = {"configuration": _why_configuration, "slow_startup": _why_startup}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "configuration": lambda finding: "Change the setting, and compare the two runs with `rankscope compare`.",
    "slow_startup": lambda finding: "Check what this part of the start reads, compiles or waits for.",
}
