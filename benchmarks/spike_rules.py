"""Rules by which others call a loss a spike, written from what they publish, as streams of verdicts.

    rule = RULES["Lightning Fabric"]()
    rule(loss=5.9, grad_norm=31.0)        # True: it would have raised, skipped or clipped here

Each has the defaults of its source. None of them is told of the fault, and none but ZClip sees the gradient norm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from analyzers.spike import SpikeDetector

__all__ = ["RULES"]

Rule = Callable[[float, float], bool]


def megatron() -> Rule:
    """Megatron-LM's rerun state machine: ten times the largest of the first 100 losses (`--check-for-spiky-loss`)."""
    seen, largest = 0, 0.0

    def rule(loss: float, grad_norm: float) -> bool:
        nonlocal seen, largest
        if seen < 100:
            seen, largest = seen + 1, max(largest, abs(loss))
            return False
        return loss >= 10.0 * largest

    return rule


def llm_foundry() -> Rule:
    """llm-foundry's KillLossSpike: twice the mean of the last 100 losses, more than 4 times in a row."""
    window: deque[float] = deque(maxlen=100)
    outliers = 0

    def rule(loss: float, grad_norm: float) -> bool:
        nonlocal outliers
        found = False
        if len(window) == 100:
            outliers = outliers + 1 if loss >= 2.0 * sum(window) / 100 else 0
            found = outliers > 4
        window.append(loss)
        return found

    return rule


def fabric() -> Rule:
    """Lightning Fabric's SpikeDetection: off the mean of the last 10 by twice that mean, and worse than the last."""
    window: deque[float] = deque(maxlen=10)
    last = math.inf

    def rule(loss: float, grad_norm: float) -> bool:
        nonlocal last
        mean = sum(window) / len(window) if window else loss
        found = not math.isfinite(loss) or (loss > last and abs(loss - mean) >= abs(2.0 * mean))
        if not found:
            window.append(loss)
            last = loss
        return found

    return rule


def zclip() -> Rule:
    """ZClip: the gradient norm 2.5 deviations over its moving mean (alpha 0.97, 25 steps of warm-up)."""
    warm: list[float] = []
    mean = variance = 0.0

    def rule(loss: float, grad_norm: float) -> bool:
        nonlocal mean, variance
        if len(warm) < 25:
            warm.append(grad_norm)
            mean = sum(warm) / len(warm)
            variance = sum((value - mean) ** 2 for value in warm) / len(warm)
            return False
        deviation = math.sqrt(variance) + 1e-6
        z = (grad_norm - mean) / deviation
        taken = mean + 2.5 / max(z, 1e-9) * 2.5 * deviation if z > 2.5 else grad_norm  # what is left after clipping
        mean = 0.97 * mean + 0.03 * taken
        variance = 0.97 * variance + 0.03 * (taken - mean) ** 2
        return z > 2.5

    return rule


def ema_times_three() -> Rule:
    """Three times the exponential moving average of the loss (0.99): what is found in many private loops."""
    mean = math.nan

    def rule(loss: float, grad_norm: float) -> bool:
        nonlocal mean
        if math.isnan(mean):
            mean = loss
        found = loss > 3.0 * mean
        mean = 0.99 * mean + 0.01 * loss
        return found

    return rule


def ours() -> Rule:
    """`analyzers.spike.SpikeDetector`, as the trainer's guard uses it."""
    detector, step = SpikeDetector(), 0

    def rule(loss: float, grad_norm: float) -> bool:
        nonlocal step
        step += 1
        return detector.observe(step=step, loss=loss, grad_norm=grad_norm).is_spike

    return rule


RULES: dict[str, Callable[[], Rule]] = {
    "Rankscope": ours, "Megatron-LM": megatron, "llm-foundry": llm_foundry, "Lightning Fabric": fabric,
    "ZClip": zclip, "EMA x 3": ema_times_three,
}  # fmt: skip
