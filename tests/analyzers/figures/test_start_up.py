"""Slow first steps do not flatten the rest of a chart, and are named."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.figures import speed
from analyzers.figures.numbers import two_ranks
from analyzers.figures.time import exposed
from analyzers.source import Floats

STEPS = np.arange(1, 61)


def durations(first: float, later: float = 100.0) -> Floats:
    values = np.full(len(STEPS), later)
    values[0] = first
    return values


def test_the_axis_ends_at_the_later_steps_and_names_the_start() -> None:
    values = durations(8000.0)
    curve = {"step": STEPS, "low": values, "middle": values, "high": values, "tokens_per_s": values}
    zero = np.zeros(len(STEPS))
    for figure in (
        speed.draw(curve),
        exposed.draw(STEPS, values, zero, zero),
        two_ranks({"step": STEPS, "a": values, "b": values}, 0, 1, "own work", "ms"),
    ):
        assert figure.layout.yaxis.range == pytest.approx((0, 110.0))
        assert [one.text for one in figure.layout.annotations] == ["↑ first steps up to 8,000 ms"]


@pytest.mark.parametrize("values", [durations(250.0), durations(8000.0)[:12], np.full(60, np.nan)])
def test_a_start_that_hides_nothing_and_short_runs_keep_their_axis(values: Floats) -> None:
    steps = STEPS[: len(values)]
    figure = two_ranks({"step": steps, "a": values, "b": values}, 0, 1, "own work", "ms")
    assert figure.layout.yaxis.range is None
    assert not figure.layout.annotations
