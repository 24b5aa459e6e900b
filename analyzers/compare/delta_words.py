"""Compare a run with its baseline in a few words: whether it is slower or has a worse loss, and with what certainty.

    words = delta_words(comparison)         # compare(baseline, run)
    words.speed       # "slower: takes 12.0 % more time per token (95 % interval 10.0 to 14.0 %)"
    words.loss        # "no clear difference: 0.004 higher, noise 0.02"

A value within its interval or noise is never called a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.compare.answer import speed_words
from analyzers.compare.loss_change import LossChange
from analyzers.compare.two_runs import Comparison
from analyzers.stragglers.throughput import Change
from analyzers.wording import listed

__all__ = ["DeltaWords", "delta_words"]

MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWords:
    """Phrases that say how a run differs from the baseline; the run is their subject."""

    speed: str
    loss: str
    findings: str
    settings: str


def delta_words(comparison: Comparison) -> DeltaWords:
    """Describe the differences; "not known" if one of the runs did not record enough."""
    load = "; the load of the hosts differs" if comparison.load_caveat else ""
    return DeltaWords(
        speed=_speed(comparison.speed) + load,
        loss=_loss(comparison.loss, comparison.nonfinite_since[1]),
        findings=_findings(comparison),
        settings=listed([name for name, _, _ in comparison.settings], MAX_NAMED) or "the same",
    )


def _speed(speed: Change | None) -> str:
    if speed is None:
        return "not known: too few steps"
    words = speed_words(speed)
    if speed.low <= 1 <= speed.high:
        return words.removeprefix("shows ")
    return f"{'faster' if speed.high < 1 else 'slower'}: {words}"


def _loss(loss: LossChange | None, nonfinite_since: int | None) -> str:
    if nonfinite_since is not None:
        return f"NaN or Inf from step {nonfinite_since} on"
    if loss is None:
        return "not known: too few common steps"
    if loss.first_different_step is None:
        return f"bitwise identical in {loss.common_steps} steps"
    side = "higher" if loss.difference > 0 else "lower"
    if loss.is_real:
        return f"{side} by {abs(loss.difference):.3g}, beyond its noise of {loss.noise:.2g}"
    return f"no clear difference: {abs(loss.difference):.3g} {side}, noise {loss.noise:.2g}"


def _findings(comparison: Comparison) -> str:
    parts = []
    if comparison.only_b:
        parts.append(f"{len(comparison.only_b)} not in the baseline")
    if comparison.only_a:
        parts.append(f"{len(comparison.only_a)} only in the baseline")
    if comparison.both:
        parts.append(f"{len(comparison.both)} in both")
    return ", ".join(parts) or "none in either run"
