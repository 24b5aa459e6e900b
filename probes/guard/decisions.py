"""The guard judges every step from reduced values, and decides the response to a bad step.

    guard = Guard(ledger, max_rollbacks=8)
    verdict = guard.judge(step, loss, grad_norm)           # the same on every rank
    if not verdict.healthy: decision = guard.decide(verdict, batch_index)

A bad step is never taken. An incident ends once `quiet_steps` steps after the failing step have been taken. The
response depends on the number of failures in the incident:

* If the step fails for the first time and its replay is healthy: restore the last good state and train the batch again.
* Otherwise, at failures one to three: skip the batch and restore the last good state, if there is one.
* At failures four and five: also skip a window of earlier batches, and lower the learning rate for a while.
* After that, or when the run's budget of rollbacks is spent: stop with a report.

A corruption of the state (`trainer.guard.integrity`) is not a batch's fault. The last state that was found healthy is
restored. No batch is skipped, and the learning rate is not lowered. A corruption counts like any other failure. A
second corruption on the same device ends the run, because that device must be replaced.

The guard is plain arithmetic. It uses no torch, no clock and nothing that may differ between ranks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from .ledger import Ledger
from .position import Position
from .spike_detector import SpikeDetector

__all__ = ["Decision", "Guard", "GuardPolicy", "RunStopped", "Verdict"]


HISTORY = 4096
"""The batches of this many steps are remembered, because a window of skipped batches may begin before the step that a
rollback restores."""


class RunStopped(RuntimeError):
    """The guard has given up, for the reason in the text; a restart would only fail again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """Limits of the guard."""

    healthy_steps: int = 3
    """Number of healthy steps after which a copy counts as good: a bad update shows in the loss within a few steps."""
    quiet_steps: int = 10
    """Good steps after a failing one that end its incident."""
    windows: tuple[int, ...] = (1, 1, 1, 4, 8)
    """Number of batches skipped at the n-th failure of an incident, ending with the failing batch. PaLM skipped
    hundreds at once, but nearly always the failing batch is the bad one. The length of this tuple is the number of
    tolerated failures.
    """
    lower_from_failure: int = 4
    """From this failure of an incident on, the learning rate is lowered as well."""
    rate_factor: float = 0.5
    """Factor of the learning rate while it is lowered."""
    rate_steps: int = 50
    """Steps for which a lowered rate holds."""
    corruptions_per_device: int = 2
    """Number of corruptions on one device that ends the run: a random bit flip hardly recurs on the same device, a
    defect does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on one step."""

    step: int
    kind: Literal["healthy", "non_finite", "spike", "corruption"]
    reason: str = ""
    healthy_step: int = -1
    """For a corruption: newest state verified as healthy."""
    devices: tuple[str, ...] = ()
    """For a corruption: the devices on which the state changed, if that is certain."""
    ranks: tuple[int, ...] = ()
    """The ranks of `devices`."""
    loss: float = math.nan
    loss_level: float = math.nan
    """For a spike: the usual loss before it."""

    @property
    def healthy(self) -> bool:
        return self.kind == "healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision to skip `batches` and restore a state from before `before_step`."""

    batches: tuple[int, ...]
    before_step: int
    rate_scale: float = 1.0


class Guard:
    """One rank's guard; all ranks' guards agree because they see the same numbers."""

    def __init__(
        self, ledger: Ledger, *, max_rollbacks: int, enabled: bool = True, policy: GuardPolicy | None = None
    ) -> None:
        self.ledger = ledger
        self.max_rollbacks = max_rollbacks
        self.enabled = enabled
        self.policy = policy or GuardPolicy()
        self.detector = SpikeDetector()
        self._corruption: Verdict | None = None
        self._taken: deque[tuple[int, int]] = deque(maxlen=HISTORY)  # (step, batch), newest last

    def report_corruption(self, verdict: Verdict) -> None:
        """Let the next `judge` return this verdict: a corruption that all ranks agreed on."""
        self._corruption = verdict

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """Judge a step before its update is taken; only healthy steps enter the detector's history."""
        if self._corruption is not None:
            return self._corruption
        wrong = [name for name, value in (("loss", loss), ("gradient norm", grad_norm)) if not math.isfinite(value)]
        if wrong:
            reason = f"non-finite {' and '.join(wrong)} at step {step}"
            return Verdict(step=step, kind="non_finite", reason=reason, loss=loss)
        spike = self.detector.observe(step, loss, grad_norm)
        if spike.is_spike and self.enabled:
            share = "" if spike.is_signed else f"{spike.loss_rise_ratio:+.0%} "
            rise = f"{share}over {spike.loss_level:.3f}, {spike.loss_z:.1f} robust sigmas"
            reason = f"loss {loss:.3f} at step {step} is a spike ({rise})"
            return Verdict(step=step, kind="spike", reason=reason, loss=loss, loss_level=spike.loss_level)
        return Verdict(step=step, kind="healthy")

    def taken(self, position: Position, batch_index: int) -> None:
        """Note that a healthy step's update was taken with this batch."""
        self._taken.append((position.step, batch_index))
        ledger = self.ledger
        if ledger.failures and position.step >= ledger.incident_step + self.policy.quiet_steps:
            ledger.failures = 0

    def decide(self, verdict: Verdict, batch_index: int, *, is_transient: bool = False) -> Decision:
        """Count the failure and choose the response. `is_transient`: the step was good when repeated. Raises RunStopped
        when the limit of failures or rollbacks is reached."""
        ledger, policy = self.ledger, self.policy
        ledger.failures += 1
        is_first_time = ledger.failures == 1 or verdict.step > ledger.incident_step
        ledger.incident_step = max(verdict.step, ledger.incident_step if ledger.failures > 1 else 0)
        if ledger.failures > len(policy.windows):
            raise self._stop(f"{ledger.failures} failures in a row, the last: {verdict.reason}")
        if ledger.rollbacks >= self.max_rollbacks:
            raise self._stop(f"recovery.max_rollbacks = {self.max_rollbacks} reached, then: {verdict.reason}")
        if verdict.kind == "corruption":
            return self._decide_corruption(verdict)
        if is_transient and is_first_time:  # the replay was good, so keep the batch, unless it has failed before
            return Decision(batches=(), before_step=verdict.step, rate_scale=ledger.rate_at(verdict.step))
        window = policy.windows[ledger.failures - 1]
        before = list(self._taken)[-(window - 1) :] if window > 1 else []
        scale = ledger.rate_at(verdict.step)
        if ledger.failures >= policy.lower_from_failure:
            scale *= policy.rate_factor
            ledger.rate_scale, ledger.rate_until_step = scale, verdict.step + policy.rate_steps
        return Decision(
            batches=(*(batch for _, batch in before), batch_index),
            before_step=before[0][0] if before else verdict.step,
            rate_scale=scale,
        )

    def _decide_corruption(self, verdict: Verdict) -> Decision:
        ledger = self.ledger
        for device in verdict.devices:
            ledger.corruptions[device] = ledger.corruptions.get(device, 0) + 1
        defective = [d for d in verdict.devices if ledger.corruptions[d] >= self.policy.corruptions_per_device]
        if defective:
            times = ledger.corruptions[defective[0]]
            raise self._stop(f"replace {defective[0]}: state was corrupted on it {times} times ({verdict.reason})")
        return Decision(batches=(), before_step=verdict.healthy_step + 1, rate_scale=ledger.rate_at(verdict.step))

    def on_rollback(self, step: int) -> None:
        """Forget the steps after `step`, because the state of `step` has been restored."""
        self._corruption = None
        while self._taken and self._taken[-1][0] > step:
            self._taken.pop()

    def state(self) -> dict[str, Any]:
        """The detector's history that belongs to a state of the model."""
        return self.detector.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.detector = SpikeDetector(self.detector.policy)
        if state:
            self.detector.load_state_dict(state)

    def give_up(self, reason: str) -> RunStopped:
        """Return the exception with which the caller ends the run for a reason outside of this policy."""
        return self._stop(reason)

    def _stop(self, reason: str) -> RunStopped:
        self.ledger.stopped = reason
        return RunStopped(f"stopped by the guard: {reason}")
