"""Curves of a training: loss, gradient norm, learning rate, and the effects of faults.

    curves = Curves(rng, noise, fault=None)
    curves.reading(step=40, batch=39, taken_bad=False).loss

Loss follows a noisy power law, final + amplitude x (step + offset) ^ -exponent; its noise is correlated over a few
steps and a little heavy-tailed, as the content of real text is. The gradient norm falls with it and is noisier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .faults import Fault
from .noise import Noise

__all__ = ["Curves", "Reading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Reduced values of one step. `local_excess`: what a bad batch adds to the loss."""

    loss: float
    grad_norm: float
    lr: float
    local_excess: float = 0.0


class Curves:
    """The numbers of one run. The same batch at the same step gives the same numbers."""

    def __init__(self, rng: np.random.Generator, noise: Noise, fault: Fault | None) -> None:
        self._noise, self.fault = noise, fault
        self._final = rng.uniform(1.6, 2.6)
        self._start = rng.uniform(9.0, 11.0)
        self._exponent = rng.uniform(0.25, 0.45)
        self._offset = rng.uniform(2.0, 8.0)
        self._peak_lr = 10 ** rng.uniform(-4.0, -2.7)
        self._warm_up = int(rng.integers(8, 30))
        self._seed = int(rng.integers(2**31))
        self._norm_level = rng.uniform(0.4, 2.0)

    def trend(self, step: float) -> float:
        """The loss without noise."""
        fall: float = ((step + self._offset) / self._offset) ** -self._exponent
        return float(self._final + (self._start - self._final) * fall)

    def reading(self, step: int, batch: int, taken_bad: bool) -> Reading:
        """Numbers of a step on a batch; `taken_bad`: the faulty update was applied, so that its effect remains."""
        rng = np.random.default_rng([self._seed, batch])
        slow = np.random.default_rng([self._seed, batch // 4]).standard_normal()
        wobble = 0.85 * rng.standard_t(6) / math.sqrt(1.5) + 0.5 * slow
        loss = self.trend(step) * math.exp(self._noise.loss_ratio * wobble)
        norm = self._norm_level * (0.4 + 2.0 * self.trend(step) / self._start)
        norm *= math.exp(self._noise.grad_norm_ratio * rng.standard_normal() + 0.5 * self._noise.loss_ratio * wobble)
        lr = self._peak_lr * min(1.0, step / self._warm_up)
        excess, fault = 0.0, self.fault
        if fault is None:
            return Reading(loss=loss, grad_norm=norm, lr=lr)
        since = step - fault.step
        if fault.kind == "bad_batch":
            if batch == fault.step - 1:
                excess = max(0.0, self._start * 1.05 - loss) * fault.factor
                loss, norm = loss + excess, norm * (2.0 + 4.0 * fault.factor)
            elif taken_bad and 0 < since < 12:
                loss *= 1.0 + 0.04 * fault.factor * math.exp(-since / 3.0)
        elif fault.kind == "lr_spike":
            lr *= 100.0 if since == 0 else 1.0
            if since >= 1:  # the too large update shows in the next loss, and decays slowly
                loss += (self._start * 1.1 - loss) * math.exp(-(since - 1) / 15.0)
                norm *= 1.0 + 6.0 * math.exp(-(since - 1) / 6.0)
        elif fault.kind == "divergence" and since > 0:
            loss *= math.exp(fault.factor * since)
            norm *= math.exp(1.5 * fault.factor * since)
        return Reading(loss=loss, grad_norm=norm, lr=lr, local_excess=excess)
