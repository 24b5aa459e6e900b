"""Evidence and next step of advice on settings and on start-up, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from analyzers.finding import Finding
from analyzers.settings.startup import PIECES
from analyzers.wording import is_number, number, percent, size_text

__all__ = ["NEXT", "WHY"]


def _why_configuration(finding: Finding) -> str:
    measured = [_measured(name, value) for name, value in finding.evidence.items() if is_number(value)]
    return f"Measured in this run: {', '.join(measured[:6])}." if measured else ""


def _measured(name: str, value: Any) -> str:
    """A number of the evidence in words: "save 50 ms", "lost at suggested 0.9 %"."""
    words = name.removeprefix("num_").replace("_", " ")
    if name.endswith("_ratio"):
        return f"{words.removesuffix(' ratio')} {percent(value)}"
    if name.endswith("_bytes"):
        return f"{words.removesuffix(' bytes')} {size_text(value)}"
    for unit in ("ms", "s", "mb"):
        if name.endswith(f"_{unit}"):
            return f"{words.removesuffix(f' {unit}')} {number(value)} {unit.replace('mb', 'MB')}"
    return f"{words} {value:,}" if isinstance(value, int) else f"{words} {number(value)}"


def _why_startup(finding: Finding) -> str:
    facts = finding.evidence
    parts = [f"{piece} {number(facts[f'{piece}_s'])} s" for piece in PIECES if f"{piece}_s" in facts]
    return f"Parts of the start: {', '.join(parts).replace('first_step', 'first step')}."


_ADVICE = {
    "plan": "Compare the layout, the batch and the devices with those of `rankscope plan`.",
    "utilisation": "Find in the report's account what devices wait for: data, communication, the bubble, the host.",
}
"""Next step by cause, for advice other than changing one setting."""


def _next_configuration(finding: Finding) -> str:
    return _ADVICE.get(finding.cause, "Change the setting, and compare the two runs with `rankscope compare`.")


WHY: Mapping[str, Callable[[Finding], str]] = {"configuration": _why_configuration, "slow_startup": _why_startup}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "configuration": _next_configuration,
    "slow_startup": lambda finding: "Check what this part of the start reads, compiles or waits for.",
}
