"""Say which of two runs is better, in two or three sentences: speed first, then the loss.

    answer("before", "after", speed, loss)
    # "after is better than before. It takes 12.0 % less time per token (95 % interval 10.0 to 14.0 %). The losses are
    #  bitwise identical in 60 steps."

A difference within its interval or noise decides nothing; where speed and loss disagree, only the reader can weigh
them. A run that did not finish, alone has a critical finding (`analyzers.compare.shortcomings`), or trains another
model, may be called faster or lower in loss, never better. Where the steps of both runs have different numbers of
tokens, the loss at equal steps decides nothing.
"""

from __future__ import annotations

from analyzers.compare.loss_change import LossChange
from analyzers.policy import SHARED
from analyzers.stragglers.throughput import Change

__all__ = ["answer", "loss_sentence", "speed_words"]

FACTOR_FROM = 1.5
"""Ratio of times from which a factor is printed instead of a percentage."""


def answer(
    run_a: str, run_b: str, speed: Change | None, loss: LossChange | None, *, against_a: str = "", against_b: str = "",
    against_either: str = "",
) -> str:  # fmt: skip
    """Return which run is better and why, B against A. `against_a`, `against_b`: why that run is not called better;
    `against_either`: why none is."""
    faster = 0 if speed is None or speed.low <= 1 <= speed.high else 1 if speed.high < 1 else -1
    learns = 0 if loss is None or not loss.is_real or not loss.equal_tokens else 1 if loss.difference < 0 else -1
    parts = []
    if faster * learns < 0:
        fast, low = (run_b, run_a) if faster > 0 else (run_a, run_b)
        parts.append(f"{fast} is faster, {low} has the lower loss.")
    elif faster + learns:
        better, worse = (run_b, run_a) if faster + learns > 0 else (run_a, run_b)
        but = " and ".join(filter(None, (against_b if better == run_b else against_a, against_either)))
        if but:
            gained = " and has the lower loss" if faster and learns else ""
            ahead = f"{better} is faster than {worse}{gained}" if faster else f"{better} has the lower loss"
            parts.append(f"{ahead}, but {but}.")
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
        parts.append(f"{run_b} {speed_words(speed)}.")
    return " ".join([*parts, loss_sentence(loss)])


def speed_words(speed: Change) -> str:
    """`takes 12.0 % less time per token (95 % interval 10.0 to 14.0 %)`, without a subject."""
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
    """Compare the second run's loss with the first's in a sentence."""
    if loss is None:
        return "Too few common steps to compare the loss."
    if loss.first_different_step is None:
        return f"The losses are bitwise identical in {loss.common_steps:,} steps."
    side = "higher" if loss.difference > 0 else "lower"
    factor = SHARED.outlier_sigmas
    noise = f"beyond its noise of {loss.noise:.2g}"
    if not loss.is_real:
        noise = f"which may be chance (less than {factor:.0f} times its noise of {loss.noise:.2g})"
    other = "" if loss.equal_tokens else " Their steps have different numbers of tokens, so this decides nothing."
    end = f"The loss is {abs(loss.difference):.3g} {side} at the end, {noise}"
    if loss.difference == 0:
        end = "The loss is the same at the end"
    return f"{end}, and differs from step {loss.first_different_step:,} on.{other}"
