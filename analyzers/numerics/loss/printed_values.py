"""Printed losses and gradient norms that are not finite, and steps that were skipped because of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analyzers.finding import Finding
from analyzers.logs.log_events import LogLine
from analyzers.numerics.loss_scale import LOWEST_SCALE
from analyzers.numerics.policy import LossScalePolicy
from analyzers.policy import SHARED

__all__ = ["DO", "exhausted_scale", "nonfinite", "nonfinite_evaluations", "skipped_steps"]

MANY = 40
"""If a log has this many lines of one kind, the log reader may have dropped further ones."""
_WARM_UP = LossScalePolicy().warm_up_steps
DO = (
    "Inspect the data, the learning rate and the update before it. In fp16 try bf16; torch.autograd.set_detect_anomaly "
    "names the operation."
)
"""Next step if no rank is known."""


def nonfinite(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report the first value that is not finite, and whether the loss or the gradient norm was first."""
    losses: dict[int, list[Any]] = {}  # step -> losses, since several ranks may print the same step
    norms: dict[int, list[Any]] = {}
    for row in steps:
        losses.setdefault(row["step"], []).append(row.get("loss"))
        norms.setdefault(row["step"], []).append(row.get("grad_norm"))
    order = sorted(losses)
    bad_loss = [step for step in order if any(map(_is_bad, losses[step]))]
    bad_norm = [step for step in order if any(map(_is_bad, norms[step]))]
    if bad_norm and not bad_loss:
        last = order.index(bad_norm[-1])
        if last < _WARM_UP and len(order) - 1 - last >= len(bad_norm):
            bad_norm = []  # they are early, and finite steps follow: the scaler was searching for its loss scale
    first = min((*bad_loss, *bad_norm), default=None)
    if first is None:
        return []
    bad = sorted({*bad_loss, *bad_norm})
    later = [step for step in order if step > bad[-1]]
    # A norm that overflows at a few steps, with as many finite ones after it, belongs to steps that the scaler skipped.
    is_once = len(bad) == 1 or (len(later) >= len(bad) and not bad_loss)
    if bad_loss and bad_norm and min(bad_norm) < min(bad_loss):
        what = (
            f"The gradient norm is not finite from step {min(bad_norm)} on, the loss from step {min(bad_loss)} on: the "
        )
        what += "gradient went first"
    elif bad_loss and bad_norm and min(bad_loss) == min(bad_norm):
        what = f"Loss and gradient norm are not finite from step {first} on"
    elif bad_loss:
        what = f"The loss is not finite from step {first} on"
    else:
        what = f"The gradient norm is not finite from step {first} on"
        known = [loss for step in order if step >= first for loss in losses[step] if loss is not None]
        what += (
            ", and the loss is printed as 0" if 0 in known else ", while the loss is" if known and not is_once else ""
        )
    if is_once:
        name = "loss" if bad_loss else "gradient norm"
        times = f"at step {first} only" if len(bad) == 1 else f"at {len(bad)} steps from {first} to {bad[-1]}"
        what = (
            f"The {name} was not finite {times}, {'and finite again afterwards' if later else 'the last printed step'}"
        )
        what += "" if bad_loss else ": in fp16 this is a skipped step"
    return [
        Finding(
            analyzer="logs",
            kind="non_finite",
            severity="warning" if is_once else "critical",
            status="fired",
            first_step=first,
            last_step=bad[-1],
            cause="unknown",
            summary=f"{what}. The log does not show on which rank it began.",
            evidence={
                "basis": f"{len(bad)} of {len(order)} printed steps have a NaN or Inf",
                "printed_steps": len(bad),
                "first_step_of_gradient": min(bad_norm, default=None),
                "first_step_of_loss": min(bad_loss, default=None),
                "do": DO,
            },
            advice="non-finite-unknown",
        )
    ]


def nonfinite_evaluations(lines: Sequence[LogLine], *, has_losses: bool) -> list[Finding]:
    """Report evaluation losses that are not finite. `has_losses`: the training losses are known and finite."""
    if not lines:
        return []
    first, num = lines[0], len(lines)
    stated = first.number("step")
    step = stated if stated is not None else first.number("after_step")
    where = f"at step {step}" if stated is not None else f"after step {step}" if step is not None else ""
    where = f"{'first ' if num > 1 else ''}{where}{' ' if where else ''}({first.place})"
    times = f"{'at least ' if num >= MANY else ''}{num} times, " if num > 1 else ""
    losses = ", while the losses of the training are" if has_losses else ""
    return [
        Finding(
            analyzer="logs",
            kind="non_finite",
            severity="warning",
            status="fired",
            first_step=step,
            last_step=lines[-1].number("step") or step,
            cause="unknown",
            summary=f"The evaluation loss ({first.text('name').lstrip('_')}) is not finite {times}{where}{losses}.",
            evidence={
                "basis": f"{first.place}: {first.text('name').lstrip('_')} is {first.text('value')}",
                "do": "Check that the evaluation set has batches: the mean of none is NaN. Otherwise check its labels "
                "(a batch whose labels are all ignored gives NaN) and data, and the precision of the evaluation.",
            },
            advice="non-finite-unknown",
        )
    ]


def exhausted_scale(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report a printed fp16 loss scale that fell to `LOWEST_SCALE` or less: gradients overflow at any scale."""
    rows = sorted(
        (row for row in steps if (row.get("loss_scale") or 0) > 0), key=lambda row: row["step"]
    )  # -1: unknown
    if not rows or rows[-1]["loss_scale"] > LOWEST_SCALE:
        return []
    largest = max(rows, key=lambda row: row["loss_scale"])
    first = next(row for row in rows if row["step"] >= largest["step"] and row["loss_scale"] <= LOWEST_SCALE)
    # A scale that never was clearly higher did not collapse: with bf16, a constant scale of 1 is printed.
    if largest["loss_scale"] < SHARED.clear_factor * rows[-1]["loss_scale"]:
        return []
    return [
        Finding(
            analyzer="logs",
            kind="non_finite",
            severity="critical",
            status="fired",
            first_step=first["step"],
            last_step=rows[-1]["step"],
            cause="unknown",
            summary=f"The fp16 loss scale is exhausted: it fell from {largest['loss_scale']:g} at step "
            f"{largest['step']} to {first['loss_scale']:g} at step {first['step']}, so gradients overflow even at its "
            "minimum.",
            evidence={
                "basis": f"{len({row['step'] for row in rows})} printed steps have a loss scale",
                "loss_scale": rows[-1]["loss_scale"],
                "do": "Train in bf16, which needs no loss scale. Otherwise lower the learning rate, clip harder, and "
                "inspect the data before that step.",
            },
            advice="non-finite-unknown",
        )
    ]


def _is_bad(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def skipped_steps(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report steps that were skipped because gradients overflowed, except in the search for a loss scale."""
    counts: dict[int, int] = {}  # several ranks may print the same count
    for row in steps:
        if row.get("skipped") is not None:
            counts[row["step"]] = max(counts.get(row["step"], 0), row["skipped"])
    # A line states how many steps were skipped since the previous line. So steps that were skipped during warm-up may
    # be stated by a line after it.
    skipped = {step: count for step, count in counts.items() if step > SHARED.doubled_factor * _WARM_UP and count}
    if not skipped:
        return []
    num, first, last = sum(skipped.values()), min(skipped), max(skipped)
    extent = max(1, max(counts) - first + 1)
    # With a dynamic loss scale it is normal that about one step in a thousand is skipped.
    if num < SHARED.min_steps or num < SHARED.saving_ratio * extent:
        return []
    return [
        Finding(
            analyzer="logs",
            kind="non_finite",
            severity="critical" if num > extent / 2 else "warning",
            status="fired",
            first_step=first,
            last_step=last,
            cause="unknown",
            summary=f"{num} of {extent} steps since step {first} were skipped because their gradients were not "
            "finite: the model learns nothing from them.",
            evidence={"basis": f"{len(skipped)} printed lines count skipped steps", "skipped_steps": num, "do": DO},
            advice="non-finite-unknown",
        )
    ]
