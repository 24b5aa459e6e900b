"""Other tools' rules for loss spikes, reimplemented from their published code; each yields one verdict per step.

    rule = RULES["Lightning Fabric"]()
    rule(loss=5.9, grad_norm=31.0)        # True: it would have raised, skipped or clipped here

Each has the defaults of its source, whose file is named. No rule knows the fault, and only ZClip uses the gradient
norm. The action after a verdict (raise, save the batches to skip, clip) is omitted; only the verdict counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from probes.guard.spike_detector import SpikeDetector

__all__ = ["RULES"]

Rule = Callable[[float, float], bool]


def megatron() -> Rule:
    """Megatron-LM's rerun state machine: at least ten times the largest of its first 100 losses.

    `megatron/core/rerun_state_machine.py`, `is_unexpectedly_large`, with the factor of `pretrain_gpt.py`
    (`--check-for-spiky-loss`). The first iteration is neither validated nor counted, another check handles NaN and Inf,
    and the largest loss is never updated later.
    """
    iteration, counted, largest = 0, 0, 0.0

    def rule(loss: float, grad_norm: float) -> bool:
        nonlocal iteration, counted, largest
        iteration += 1
        if iteration == 1 or not math.isfinite(loss):
            return False
        if counted < 100:
            counted, largest = counted + 1, max(largest, abs(loss))
            return False
        return abs(loss) >= 10.0 * largest

    return rule


def llm_foundry() -> Rule:
    """llm-foundry's KillLossSpike: at least twice the mean of the last 100 losses, five times in a row; or half of the
    last 100 losses above the largest of the first 100 (at most 10), from step 200 on.

    `llmfoundry/callbacks/kill_loss_spike_callback.py`. The window is 5 % of the run and at least 100 steps: 100 here.
    Each loss is compared with the window before it joins it.
    """
    window: deque[float] = deque(maxlen=100)
    step, outliers, cap = 0, 0, 10.0

    def rule(loss: float, grad_norm: float) -> bool:
        nonlocal step, outliers, cap
        step += 1
        found = False
        if len(window) == 100:
            if step == 101:
                cap = min(cap, max(window))
            outliers = outliers + 1 if loss >= 2.0 * sum(window) / 100 else 0
            found = outliers > 4 or (step >= 200 and sum(value > cap for value in window) >= 50)
        window.append(loss)
        return found

    return rule


def fabric() -> Rule:
    """Lightning Fabric's SpikeDetection: differs from the mean of the last 10 by twice that mean, and exceeds the last
    loss.

    `src/lightning/fabric/utilities/spike.py`: window 10, warm-up 1 batch, no absolute tolerance, relative tolerance 2;
    a value that is not finite counts as a spike, and spikes update neither the mean nor the last loss.
    """
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
    """ZClip: the gradient norm 2.5 deviations over its moving mean (alpha 0.97, 25 steps of warm-up).

    `zclip/zclip.py` of bluorion-com/ZClip, mode "zscore" with "adaptive_scaling": the moving mean and variance are
    updated with the clipped norm: the mean + 2.5 deviations divided by z / 2.5.
    """
    warm: list[float] = []
    mean = variance = 0.0

    def rule(loss: float, grad_norm: float) -> bool:
        nonlocal mean, variance
        if len(warm) < 25:
            warm.append(grad_norm)
            mean = sum(warm) / len(warm)
            variance = sum((value - mean) ** 2 for value in warm) / len(warm)
            return False
        deviation = math.sqrt(variance)
        z = (grad_norm - mean) / (deviation + 1e-6)
        taken = mean + 2.5 * deviation / (z / 2.5) if z > 2.5 else grad_norm  # the clipped norm
        mean = 0.97 * mean + 0.03 * taken
        variance = 0.97 * variance + 0.03 * (taken - mean) ** 2
        return z > 2.5

    return rule


def ema_times_three() -> Rule:
    """Three times the exponential moving average of the loss (0.99), a common rule in hand-written loops."""
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
    """`probes.guard.spike_detector.SpikeDetector`, as the trainer's guard uses it."""
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
