"""State which of two runs is better, in two or three sentences: speed first, then the loss.

    answer("before", "after", speed, loss)
    # "after is better than before. after takes 12.0 % less time per token (95 % interval 10.0 to 14.0 %). The losses
    #  are bitwise identical in 60 steps."

A difference counts only beyond its interval or noise. If one run is faster and the other has the lower loss, neither is
called better. A run that has a `shortcoming` (it did not finish, or it alone has a critical finding) or trains a
different model may be called faster or lower in loss, but not better. The loss at equal steps does not count if the
runs differ in tokens per step. The speed does not count if the load of the hosts may explain the difference (`load`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzers.compare.loss_change import LossChange
from analyzers.kinds import heading
from analyzers.policy import SHARED
from analyzers.stragglers.throughput import Change

if TYPE_CHECKING:
    from analyzers.diagnose import Diagnosis

__all__ = ["answer", "loss_sentence", "nonfinite_sentence", "shortcoming", "speed_words"]

FACTOR_FROM = 1.5
"""At this time ratio and above, "1.50x faster" is printed instead of a percentage."""
_ENDS = {
    "failed": "ended with an error",
    "given_up": "was given up",
    "launcher_lost": "lost its launcher",
    "interrupted": "was interrupted",
    "preempted": "was preempted",
}


def answer(
    run_a: str, run_b: str, speed: Change | None, loss: LossChange | None, *, against_a: str = "", against_b: str = "",
    against_either: str = "", load: str = "", nonfinite_since: tuple[int | None, int | None] = (None, None),
) -> str:  # fmt: skip
    """Return which run is better and why. `against_a`, `against_b`: shortcomings of run A and of run B.
    `against_either`: a reason to call neither better. `load`: a sentence if the load of the hosts may explain the
    difference in speed. `nonfinite_since`: for A and B, the step from which the loss is NaN or Inf, which is worse
    than any finite loss."""
    # +1: B wins, -1: A wins, 0: undecided.
    by_speed = 0 if speed is None or load else int(speed.high < 1) - int(speed.low > 1)
    by_loss = 0 if loss is None or not loss.is_real or not loss.equal_tokens else 1 if loss.difference < 0 else -1
    since_a, since_b = nonfinite_since
    if (since_a is None) != (since_b is None):
        by_loss = 1 if since_b is None else -1
    parts = []
    if by_speed * by_loss < 0:
        fast, low = (run_b, run_a) if by_speed > 0 else (run_a, run_b)
        parts.append(f"{fast} is faster, {low} has the lower loss.")
    elif by_speed + by_loss:
        better, worse = (run_b, run_a) if by_speed + by_loss > 0 else (run_a, run_b)
        caveat = " and ".join(filter(None, (against_b if better == run_b else against_a, against_either)))
        if caveat:
            and_loss = " and has the lower loss" if by_speed and by_loss else ""
            ahead = f"{better} is faster than {worse}{and_loss}" if by_speed else f"{better} has the lower loss"
            parts.append(f"{ahead}, but {caveat}.")
        else:
            parts.append(f"{better} is better than {worse}.")
    elif bool(against_a) != bool(against_b):
        better, worse = (run_b, run_a) if against_a else (run_a, run_b)
        parts.append(f"{better} is better than {worse}, which {against_a or against_b}.")
    elif speed is not None:
        parts.append(f"Neither {run_b} nor {run_a} is shown to be better.")
    if speed is None:
        parts.append(f"{run_b} and {run_a} have too few steps to compare their speed.")
    else:
        parts.append(f"{run_b} {speed_words(speed)}.{f' {load}' if load else ''}")
    lost = [nonfinite_sentence(run, since) for run, since in ((run_a, since_a), (run_b, since_b)) if since is not None]
    compared = [] if loss is None and lost else [loss_sentence(loss)]
    return " ".join([*parts, *compared, *lost])


def speed_words(speed: Change) -> str:
    """Predicate of a sentence about run B: `takes 12.0 % less time per token (95 % interval 10.0 to 14.0 %)`."""
    per = "token" if speed.per_token else "step"
    if speed.low <= 1 <= speed.high:
        low, high = 100 * (speed.low - 1), 100 * (speed.high - 1)
        return f"shows no difference in speed: {low:+.1f} to {high:+.1f} % time per {per} (95 % interval)"
    is_faster = speed.high < 1
    ratio, low, high = (1 / speed.ratio, 1 / speed.high, 1 / speed.low) if is_faster else (
        speed.ratio, speed.low, speed.high)  # fmt: skip
    if ratio >= FACTOR_FROM:
        word = "faster" if is_faster else "slower"
        return f"is {ratio:.2f}x {word} per {per} (95 % interval {low:.2f} to {high:.2f})"
    shares = sorted(100 * abs(1 - value) for value in (speed.low, speed.high))
    word = "less" if is_faster else "more"
    return (
        f"takes {100 * abs(1 - speed.ratio):.1f} % {word} time per {per} "
        f"(95 % interval {shares[0]:.1f} to {shares[1]:.1f} %)"
    )


def loss_sentence(loss: LossChange | None) -> str:
    """One sentence on the loss of run B relative to run A."""
    if loss is None:
        return "Too few common steps to compare the loss."
    if loss.first_different_step is None:
        return f"The losses are bitwise identical in {loss.common_steps} steps."
    side = "higher" if loss.difference > 0 else "lower"
    factor = SHARED.outlier_sigmas
    noise = f"beyond its noise of {loss.noise:.2g}"
    if not loss.is_real:
        noise = f"which may be chance (less than {factor:.0f} times its noise of {loss.noise:.2g})"
    other = "" if loss.equal_tokens else " This decides nothing, because the tokens per step differ."
    if loss.difference == 0:
        return f"The loss is the same at the end, and first differs at step {loss.first_different_step}.{other}"
    end = f"The loss is {abs(loss.difference):.3g} {side} at the end of their {loss.common_steps} common steps, {noise}"
    return f"{end}, and differs from step {loss.first_different_step} on.{other}"


def nonfinite_sentence(run: str, since: int) -> str:
    """Sentence on a run whose loss is NaN or Inf from step `since` to the end."""
    return f"The loss of {run} is NaN or Inf from step {since} on."


def shortcoming(run: Diagnosis, other: Diagnosis) -> str:
    """Return a clause, without a subject, on the shortcomings that only `run` has; empty if none.

    A run does not count as failed if its end was not recorded.
    """
    found = []
    ended, other_ended = (str(one.run.get("ended") or "") for one in (run, other))
    if ended in _ENDS and other_ended not in _ENDS:
        step = run.run.get("steps")
        found.append(_ENDS[ended] + (f" after step {step}" if isinstance(step, int) else ""))
    kinds, other_kinds = ([found.kind for found in one.fired if found.severity == "critical"] for one in (run, other))
    if kinds := [kind for kind in kinds if kind not in other_kinds]:
        named = ", ".join(dict.fromkeys(heading(kind) for kind in kinds))
        found.append(f"has a critical finding ({named})")
    return " and ".join(found)
