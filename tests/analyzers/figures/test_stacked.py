"""Stacked parts of steps: no line is drawn through steps that have no data."""

from __future__ import annotations

import numpy as np

from analyzers.figures.time import stacked


def test_steps_without_data_are_a_gap() -> None:
    steps = np.array([*range(10, 20), *range(500, 510), 900])
    figure = stacked.draw(steps, [("a", np.ones(21), "#123456"), ("b", np.ones(21), "#654321")], y="ms")
    shown = [(trace.name, trace.x[0], trace.x[-1], trace.showlegend) for trace in figure.data]
    assert shown == [
        ("a", 10, 19, True), ("b", 10, 19, True), ("a", 500, 509, False), ("b", 500, 509, False),
        ("a", 900, 900, False), ("b", 900, 900, False),
    ]  # fmt: skip
    assert len({trace.stackgroup for trace in figure.data}) == 3
    assert [trace.mode for trace in figure.data][-1] == "markers"


def test_every_kth_step_is_no_gap() -> None:
    assert stacked.stretches(np.arange(0, 1000, 50)) == [(0, 20)]
    assert stacked.stretches(np.array([1, 2, 4, 5])) == [(0, 4)], "one step that is not there"
    assert stacked.stretches(np.array([7])) == [(0, 1)]
    assert stacked.stretches(np.zeros(0, dtype=np.int64)) == []


def test_many_gaps_are_few_traces() -> None:
    pairs = np.sort(np.concatenate([np.arange(0, 10_000, 50), np.arange(1, 10_000, 50), np.arange(2, 10_000, 50)]))
    assert len(stacked.stretches(pairs)) == stacked.MAX_STRETCHES
