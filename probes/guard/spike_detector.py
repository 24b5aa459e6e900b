"""Loss spikes: a streaming detector shared by the trainer's guard, `watch` and the post-mortem.

    detector = SpikeDetector()
    verdict = detector.observe(step=40, loss=5.9, grad_norm=31.0)
    if verdict.is_spike: ...               # the same on every rank that feeds it the same reduced values

The detector is plain Python over a short history. A call in each step takes 5 us, or 30 us if the loss rises.

1. Non-finite values and spikes never enter the history, which holds logarithms. A loss that is zero or negative
   (every loss, if many are) is judged by differences instead of rules 2 to 4 (`signed_loss`).
2. level = median of the newest `LEVEL_WINDOW` clean logarithms; residual = log(value) - level. Early in a run the level
   follows the falling loss. If the level lags behind, the test only becomes more conservative.
3. center = max(0, median of the clean residuals), scale = max(1.4826 x their median absolute deviation, floor). Both
   are computed from residuals of rule 2, so they include the loss's trend. z = (residual - center) / scale.
4. A step is a spike in three cases. (a) z and rise are both large. If the gradient norm is ordinary, the rise must be
   huge, or follow another such rise. (b) z and rise are moderate, and the gradient norm is raised too. (c) The rise is
   large and the gradient norm is many times its level; a small z is enough. A high gradient norm without a rise of the
   loss is no spike; it is common in warm-up and with clipping. The rise must also be at least a share of the total fall
   of the loss so far, because near zero the logarithm of a loss jumps with each hard sample.
5. After `relearn_after` consecutive spikes the history is rebuilt from them: the data has changed, or nobody reacts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .signed_loss import HISTORY, LEVEL_WINDOW, MAD_TO_SIGMA, SignedLoss, SignedPolicy, signed_spike

__all__ = ["SpikeDetector", "SpikePolicy", "SpikeVerdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikePolicy:
    """When a loss is a spike. Ratios are relative rises over the level: 0.2 = 20 %.

    The strong pair: 8 robust sigmas are beyond the heavy tails of small batches (a batch of 16 sequences of source code
    varies by 3 to 6 %), and 20 % is below every spike that the published logbooks call one. Once in some hundred
    thousand steps a hard batch still exceeds both, with an ordinary gradient. So below `alone_rise_ratio` and `alone_z`
    the gradient norm, if known, must be raised as well, or the next step must confirm the rise. The moderate pair needs
    the gradient norm as a second witness; random tokens on one data rank of four raise the loss of the global batch by
    15 to 25 % and the gradient norm by far more.
    """

    warm_up_steps: int = 16
    """Clean observations before the first verdict; from fewer the deviation is not stable."""
    strong_z: float = 8.0
    """Robust sigmas of a spike that the gradient norm need not clearly confirm."""
    strong_rise_ratio: float = 0.20
    """Smallest rise for `strong_z`."""
    alone_rise_ratio: float = 0.75
    """Rise at which a strong spike needs no other evidence; random tokens for a whole batch are above it (recorded in a
    young run: +90 % at 8 sigmas, and an ordinary gradient)."""
    alone_z: float = 10.5
    """Robust sigmas at which a smaller rise needs no other evidence."""
    alone_z_rise_ratio: float = 0.45
    """Smallest rise for `alone_z`."""
    moderate_z: float = 4.0
    """Robust sigmas of the loss where the gradient norm agrees."""
    moderate_rise_ratio: float = 0.08
    """Smallest rise of the loss where the gradient norm agrees."""
    grad_z: float = 5.0
    """Robust sigmas of the gradient norm that count as agreement."""
    grad_rise_ratio: float = 0.5
    """Smallest rise of the gradient norm that counts as agreement; a strong pair with less is a hard batch."""
    broken_grad_rise_ratio: float = 7.0
    """If the gradient norm rises by this ratio (to 8 times its level), any clear rise of the loss counts. With small
    batches the noise of the loss hides a broken update: for example in a run of 8 short sequences per step, in which
    the learning rate was 100 times too high."""
    broken_z: float = 2.5
    """Robust sigmas of the loss that count if the gradient norm is broken; clean losses reach this once in a hundred
    steps.
    """
    least_descent_ratio: float = 0.005
    """Minimum rise of the loss / its total fall so far. Source: in clean loops whose model memorises its data
    (loss from 36 to 0.04, or from 4.2 to 0.005), the loss rises by up to 0.0048 of its descent. For a language model
    whose loss fell from 11 to 2.0, the smallest rise that counts (8 %) is 0.018 of the descent."""
    loss_spread_floor: float = 0.01
    """Smallest assumed spread of the log loss: if the history happens to be very quiet, 1 % must not count as a
    deviation.
    """
    grad_spread_floor: float = 0.05
    """Smallest assumed spread of the log gradient norm. It has its own floor, because it is noisier than the loss."""
    relearn_after: int = 64
    """Consecutive spike steps after which their level counts as the new normal (steps)."""
    signed: SignedPolicy = field(default_factory=SignedPolicy)
    """The rules for a loss that is not always positive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeVerdict:
    """Evidence of one step: loss and gradient norm against their history.

    `z` is in robust sigmas. It is NaN without a history, and also if the loss has risen too little for a spike: then it
    is not computed.
    """

    step: int
    state: Literal["ok", "warm_up", "non_finite", "spike"]
    loss: float
    grad_norm: float
    loss_level: float = math.nan
    loss_z: float = math.nan
    loss_rise_ratio: float = math.nan
    grad_z: float = math.nan
    grad_rise_ratio: float = math.nan
    is_signed: bool = False
    """True if the loss is not always positive and was judged by differences; the rise is then in units of the loss's
    typical size."""

    @property
    def is_spike(self) -> bool:
        """Return True if the step should be refused."""
        return self.state == "spike"


class _Series:
    """Clean history of the logarithm of one quantity."""

    __slots__ = ("floor", "levels", "residuals")

    def __init__(self, floor: float) -> None:
        self.levels: deque[float] = deque(maxlen=LEVEL_WINDOW)
        self.residuals: deque[float] = deque(maxlen=HISTORY)
        self.floor = floor

    def rise(self, log_value: float) -> tuple[float, float]:
        """Return (level, relative rise) of a value against the history; NaN without a history."""
        level = _median(self.levels) if self.levels else math.nan
        return level, math.expm1(min(log_value - level, 50.0)) if self.residuals else math.nan

    def z(self, log_value: float, level: float) -> float:
        """Robust sigmas of a value against the history; NaN without a history."""
        if not self.residuals:
            return math.nan
        middle = _median(self.residuals)
        scale = max(MAD_TO_SIGMA * _median([abs(r - middle) for r in self.residuals]), self.floor)
        return (log_value - level - max(0.0, middle)) / scale

    def learn(self, log_value: float) -> None:
        if self.levels:
            self.residuals.append(log_value - _median(self.levels))
        self.levels.append(log_value)

    def forget(self) -> None:
        self.levels.clear()
        self.residuals.clear()


class SpikeDetector:
    """Feed it each step's reduced loss and gradient norm, in the order in which the steps ran."""

    def __init__(self, policy: SpikePolicy | None = None, *, highest_loss: float = 0.0) -> None:
        """`highest_loss`: highest level in earlier steps, if the detector starts in the middle of a run."""
        self.policy = policy = policy or SpikePolicy()
        self.highest_loss = highest_loss
        """Highest level so far."""
        ratios = (policy.strong_rise_ratio, policy.alone_rise_ratio, policy.alone_z_rise_ratio)
        self._least_rise = min(*ratios, policy.moderate_rise_ratio)
        self._loss = _Series(self.policy.loss_spread_floor)
        self._grad = _Series(self.policy.grad_spread_floor)
        self._signed = SignedLoss(self.policy.signed)
        self._num_clean = 0
        self._rejected: list[tuple[float, float]] = []
        # the previous step's loss was high, but its gradient norm showed that it was no spike
        self._denied_before = False

    def observe(self, step: int, loss: float, grad_norm: float = math.nan) -> SpikeVerdict:
        """Judge one step and, if it is clean, learn from it. A NaN `grad_norm` with a finite loss means unknown."""
        if not math.isfinite(loss) or math.isinf(grad_norm):
            return SpikeVerdict(step=step, state="non_finite", loss=loss, grad_norm=grad_norm)
        log_grad = math.log(grad_norm) if grad_norm > 0.0 else math.nan
        if loss <= 0.0 or self._signed.is_usual:
            return self._observe_signed(step, loss, grad_norm, log_grad)
        log_loss = math.log(loss)
        loss_z = grad_z = grad_rise = math.nan
        level, loss_rise = self._loss.rise(log_loss)
        if loss_rise >= self._least_rise:  # most losses do not rise, and these statistics read the whole history
            loss_z = self._loss.z(log_loss, level)
            grad_level, grad_rise = self._grad.rise(log_grad)
            grad_z = self._grad.z(log_grad, grad_level)
        warm = self._num_clean >= self.policy.warm_up_steps
        spike = warm and self._is_spike(loss_z, loss_rise, grad_z, grad_rise)
        if spike and self._signed.num_signed:  # near zero, the logarithm exaggerates changes of a falling loss
            spike = self._signed.judge(loss).z >= self.policy.moderate_z
        usual = math.exp(level) if math.isfinite(level) else math.nan
        if spike and loss - usual < self.policy.least_descent_ratio * (self.highest_loss - usual):
            spike = False
        if usual > self.highest_loss:  # False for NaN
            self.highest_loss = usual
        if spike:
            self._reject(loss, log_grad)
        else:
            self._learn(loss, log_grad)
        return SpikeVerdict(
            step=step,
            state="spike" if spike else "ok" if warm else "warm_up",
            loss=loss,
            grad_norm=grad_norm,
            loss_level=usual,
            loss_z=loss_z,
            loss_rise_ratio=loss_rise,
            grad_z=grad_z,
            grad_rise_ratio=grad_rise,
        )

    def _observe_signed(self, step: int, loss: float, grad_norm: float, log_grad: float) -> SpikeVerdict:
        """Judge a step by differences: this loss, or many in the history, have no logarithm."""
        judged = self._signed.judge(loss)
        grad_level, grad_rise = self._grad.rise(log_grad)
        warm = self._num_clean >= self.policy.warm_up_steps
        agrees = grad_rise >= self.policy.grad_rise_ratio  # False for NaN
        high = warm and signed_spike(judged, self.policy.signed, agrees=agrees, lasts=True)
        spike = high and signed_spike(judged, self.policy.signed, agrees=agrees, lasts=self._denied_before)
        self._denied_before = high
        if spike:
            self._reject(loss, log_grad)
        elif not high:
            self._learn(loss, log_grad)
        return SpikeVerdict(
            step=step,
            state="spike" if spike else "ok" if warm else "warm_up",
            loss=loss,
            grad_norm=grad_norm,
            loss_level=judged.level,
            loss_z=judged.z,
            loss_rise_ratio=judged.rise_ratio,
            grad_z=self._grad.z(log_grad, grad_level) if high else math.nan,
            grad_rise_ratio=grad_rise if high else math.nan,
            is_signed=True,
        )

    def learn_history(self, seen: Iterable[tuple[float, float]]) -> None:
        """Learn the clean (loss, gradient norm) of earlier steps, without judging them."""
        for loss, grad_norm in seen:
            self._learn(loss, math.log(grad_norm) if grad_norm > 0.0 else math.nan)

    def clean_range(self) -> tuple[float, float]:
        """Range of losses that are no spike in the next step, whatever the gradient norm; losses outside may be one."""
        if self._num_clean < self.policy.warm_up_steps:
            return -math.inf, math.inf
        if self._signed.is_usual:
            return math.inf, -math.inf  # an empty interval, because losses that may be negative must all be judged
        if not self._loss.residuals:
            return 0.0, math.inf
        # The interval is made slightly narrower, because the detector's logarithm and exponential are rounded.
        return 0.0, math.exp(_median(self._loss.levels)) * (1.0 + self._least_rise) * (1.0 - 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """The history as plain lists, for a checkpoint."""
        return {
            "loss": [list(self._loss.levels), list(self._loss.residuals)],
            "grad": [list(self._grad.levels), list(self._grad.residuals)],
            "signed": list(self._signed.values),
            "num_clean": self._num_clean,
            "highest": self.highest_loss,
            "denied_before": self._denied_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the history from a checkpoint."""
        for series, name in ((self._loss, "loss"), (self._grad, "grad")):
            levels, residuals = state[name]
            series.forget()
            series.levels.extend(levels)
            series.residuals.extend(residuals)
        self._signed.forget()
        for loss in state.get("signed", ()):
            self._signed.learn(loss)
        self._num_clean = int(state["num_clean"])
        self.highest_loss = float(state.get("highest", 0.0))
        self._denied_before = bool(state.get("denied_before", False))
        self._rejected.clear()

    def _is_spike(self, loss_z: float, loss_rise: float, grad_z: float, grad_rise: float) -> bool:
        """Judge one step, and remember whether an ordinary gradient norm refuted a rise of the loss."""
        policy = self.policy
        strong = loss_z >= policy.strong_z and loss_rise >= policy.strong_rise_ratio
        alone = loss_rise >= (policy.alone_rise_ratio if loss_z < policy.alone_z else policy.alone_z_rise_ratio)
        denied = strong and not alone and grad_rise < policy.grad_rise_ratio  # False for NaN
        strong = strong and (not denied or self._denied_before)  # a second high loss confirms the first
        self._denied_before = denied
        moderate = loss_z >= policy.moderate_z and loss_rise >= policy.moderate_rise_ratio
        gradient_agrees = grad_z >= policy.grad_z and grad_rise >= policy.grad_rise_ratio  # False for NaN
        broken = loss_z >= policy.broken_z and loss_rise >= policy.strong_rise_ratio
        broken = broken and gradient_agrees and grad_rise >= policy.broken_grad_rise_ratio
        return strong or broken or (moderate and gradient_agrees)

    def _learn(self, loss: float, log_grad: float) -> None:
        self._rejected.clear()
        self._num_clean += 1
        self._signed.learn(loss)
        if loss > 0.0:
            self._loss.learn(math.log(loss))
        if math.isfinite(log_grad):
            self._grad.learn(log_grad)

    def _reject(self, loss: float, log_grad: float) -> None:
        self._rejected.append((loss, log_grad))
        if len(self._rejected) < self.policy.relearn_after:
            return
        rejected = self._rejected[:]
        self._loss.forget()
        self._grad.forget()
        self._signed.forget()
        for value in rejected:
            self._learn(*value)


def _median(values: Sequence[float] | deque[float]) -> float:
    ordered = sorted(values)
    half, odd = divmod(len(ordered), 2)
    return ordered[half] if odd else 0.5 * (ordered[half - 1] + ordered[half])
