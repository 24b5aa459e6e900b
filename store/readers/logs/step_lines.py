"""Steps that a trainer printed: number, loss, gradient norm, duration, out of one line.

    read_step(" iteration 100/ 5000 | elapsed time per iteration (ms): 812.0 | lm loss: 6.9E+00 | grad norm: 1.2 |")

Known are Megatron, DeepSpeed, torchtitan, transformers, ms-swift, verl, nanoGPT and lines of the same shape.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["LITERALS", "StepLine", "read_step", "step_of"]

LITERALS = (b"loss", b"Loss", b"grad norm", b"grad_norm")
_NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|NaN|inf|Infinity|-inf))"
_STEP = re.compile(
    r"(?:global_step/max_steps['\"]?\s*:\s*['\"]?|"
    r"\b(?:global[_ ])?(?:step|steps|iteration|iter)['\"]?\s*[:=]?\s*\[?\s*)(\d{1,12})\b",
    re.IGNORECASE,
)
_LOSS = re.compile(
    r"(?:^|[^\w/])(?:lm |reduced_|train(?:ing)?[_/ ]|(?:train/)?actor/(?:pg_)?)?loss['\"]?\s*[:=]?\s*\[?" + _NUMBER,
    re.IGNORECASE,
)
_GRAD_NORM = re.compile(r"grad(?:ient)?[_ ]?norm['\"]?\s*[:=]?\s*" + _NUMBER, re.IGNORECASE)
_RATE = re.compile(r"(?:learning[_ ]rate|\blr)['\"]?\s*[:=]?\s*\[?" + _NUMBER, re.IGNORECASE)
_SECONDS = r"iter(?:ation)? time|step[_ ]time|time/step|timing_s/step|time per step|perf/time_per_step"
_TIMES = (
    (re.compile(r"(?:elapsed time per iteration|time per step) \(ms\)\s*[:=]\s*" + _NUMBER), 1e6),
    (re.compile(rf"(?:{_SECONDS})(?: \(s\))?['\"]?\s*[:=]\s*" + _NUMBER + r"(?!\s*ms)"), 1e9),
    (re.compile(r"(?:time|dt)[ :=]+" + _NUMBER + r"\s*ms"), 1e6),
)
_SPEED = re.compile(r"(?:train_speed\(iter/s\)|iterations?/sec|it/s)['\"]?\s*[:=]\s*" + _NUMBER)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """A step's values on one line. `step` is None where the trainer prints none (transformers): lines are counted."""

    step: int | None
    loss: float | None
    grad_norm: float | None
    lr: float | None
    duration_ns: int | None


def step_of(text: str) -> int | None:
    """The number of the step that a line names, whatever else it says."""
    found = _STEP.search(text)
    return int(found[1]) if found else None


def read_step(text: str) -> StepLine | None:
    """The step of a line; None if it has neither loss nor gradient norm of a step."""
    loss, grad_norm = _LOSS.search(text), _GRAD_NORM.search(text)
    if loss is None and grad_norm is None:
        return None
    step = step_of(text)
    if step is None and (loss is None or not ("{" in text and "epoch" in text)):
        return None
    return StepLine(
        step=step,
        loss=_optional(loss),
        grad_norm=_optional(grad_norm),
        lr=_optional(_RATE.search(text)),
        duration_ns=_duration_ns(text),
    )


def _duration_ns(text: str) -> int | None:
    # Each pattern is tried only where a part of all its words stands: a find costs a tenth of a search.
    for pattern, unit_ns in _TIMES if "tim" in text or "dt" in text else ():
        if (match := pattern.search(text)) and 0 < (value := _float(match[1])) * unit_ns < 1e15:
            return int(value * unit_ns)
    speed = _SPEED.search(text) if "/s" in text else None
    rate = _float(speed[1]) if speed else 0.0
    return int(1e9 / rate) if 1e-6 < rate < 1e6 else None


def _optional(match: re.Match[str] | None) -> float | None:
    return _float(match[1]) if match else None


def _float(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan
