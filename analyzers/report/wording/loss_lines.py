"""Sentences on the loss of a run, the same in terminal and ticket.

loss_line(facts)                     # "5.5460 at the start, 2.4513 at the end. Between the first ..."
validation_line(facts["validation"]) # "Loss 2.2990 at step 150, the lowest of 15 evaluations."
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzers.wording import counted, loss_text

__all__ = ["loss_line", "validation_line"]


def loss_line(facts: Mapping[str, Any]) -> str:
    """First and last loss and the change between them. A loss that became NaN or Inf and stayed so has no end value."""
    first, last = (loss_text(facts[name], 4) for name in ("first_loss", "last_loss"))
    if (lost_at := facts.get("loss_lost_at_step")) is not None:
        return f"{first} at the start, {last} at the last finite step. NaN or Inf from step {lost_at} to the end."
    if (facts.get("logs") or {}).get("printed_losses") == 1:
        return f"{first} in the only line that prints it"
    text = f"{first} at the start, {last} at the end" if first != last else f"{first} at the start and at the end"
    drop, ratio = facts.get("loss_drop"), facts.get("loss_drop_in_noise")
    if drop is None or ratio is None:
        return text
    if abs(ratio) < 1:
        return f"{text}. Between the first and the last tenth it changed by less than its noise."
    verb = "fell" if drop > 0 else "rose"
    return f"{text}. Between the first and the last tenth it {verb} by {loss_text(abs(drop), 2)}, {_times(ratio)}."


def _times(ratio: float) -> str:
    return f"{loss_text(abs(ratio), 1 if abs(ratio) < 10 else 0)}x the noise"


def validation_line(validation: Mapping[str, Any]) -> str:
    """The last validation loss, and the lowest if they differ."""
    last = f"Loss {loss_text(validation['last_loss'], 4)} at step {validation['last_step']}"
    if validation["lowest_step"] == validation["last_step"]:
        return f"{last}, the lowest of {counted(validation['evaluations'], 'evaluation')}."
    return f"{last}. The lowest was {loss_text(validation['lowest_loss'], 4)} at step {validation['lowest_step']}."
