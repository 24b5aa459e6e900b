"""What is called a difference between a run and its baseline, and what is not."""

from __future__ import annotations

import pytest

from analyzers.compare.delta_words import delta_words
from analyzers.compare.loss_change import LossChange
from analyzers.compare.two_runs import Comparison
from analyzers.stragglers.throughput import Change


def compared(*, speed: tuple[float, float, float] | None = None, loss: LossChange | None = None) -> Comparison:
    change = speed and Change(
        ratio=speed[0], low=speed[1], high=speed[2], per_token=True, ms_before=10.0, ms_after=10.0 * speed[0]
    )
    return Comparison(
        run_a="a", run_b="b", settings=tuple((f"optim.{name}", "1", "2") for name in "pqrs"), versions=(),
        speed=change or None, phases={}, loss=loss, only_a=(), only_b=(), both=(), goodput={}, findings=(),
    )  # fmt: skip


def loss_change(difference: float, *, is_real: bool, first: int | None = 3) -> LossChange:
    return LossChange(
        common_steps=100, difference=difference, noise=0.02, first_different_step=first, is_real=is_real
    )  # fmt: skip


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (None, "not known: too few steps"),
        ((1.12, 1.10, 1.14), "slower: takes 12.0 % more time per token (95 % interval 10.0 to 14.0 %)"),
        ((0.5, 0.48, 0.52), "faster: is 2.00x faster per token (95 % interval 1.92 to 2.08)"),
        ((1.02, 0.99, 1.05), "no difference in speed: -1.0 to +5.0 % time per token (95 % interval)"),
        ((1.0, 1.0, 1.0), "no difference in speed: +0.0 to +0.0 % time per token (95 % interval)"),
    ],
)
def test_a_speed_difference_needs_an_interval_without_zero(
    speed: tuple[float, float, float] | None, words: str
) -> None:
    assert delta_words(compared(speed=speed)).speed == words


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (None, "not known: too few common steps"),
        (loss_change(0.1, is_real=True), "higher by 0.1, beyond its noise of 0.02"),
        (loss_change(-0.1, is_real=True), "lower by 0.1, beyond its noise of 0.02"),
        (loss_change(0.01, is_real=False), "no clear difference: 0.01 higher, noise 0.02"),
        (loss_change(0.0, is_real=False, first=None), "bitwise identical in 100 steps"),
    ],
)
def test_a_loss_difference_must_exceed_its_noise(loss: LossChange | None, words: str) -> None:
    assert delta_words(compared(loss=loss)).loss == words


def test_settings_are_named_and_the_rest_counted() -> None:
    words = delta_words(compared())
    assert words.settings == "optim.p, optim.q, optim.r and 1 more"
    assert words.findings == "none in either run"
