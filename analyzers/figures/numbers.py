"""Small line charts over the steps: learning rate, loss scale, compression error, expert load, memory.

figure = rate(columns)          # columns step, lr
figure = scale([(40, 32768.0), (44, 16384.0)])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from plotly.graph_objects import Figure

from analyzers.figures.drawing.series import Series, band, draw
from analyzers.figures.drawing.start_up import limit_start
from analyzers.figures.drawing.theme import SEQUENCE
from analyzers.source import floats, ints

__all__ = ["compression", "experts", "logged", "memory", "rate", "scale", "two_ranks"]

HEIGHT = 260


def rate(columns: Mapping[str, Any]) -> Figure:
    """Columns step, lr."""
    line = Series(name="rate", x=ints(columns["step"]), y=floats(columns["lr"]), colour=SEQUENCE[2])
    figure = draw([line], x="step", y="learning rate", height=HEIGHT, from_zero=True)
    figure.update_yaxes(exponentformat="e")  # 1e-4 as in a configuration, not 100µ
    return figure


def scale(changes: Sequence[tuple[int, float]]) -> Figure:
    """`changes`: (step, loss scale after an overflow); the axis is logarithmic."""
    steps, scales = zip(*changes, strict=True)
    line = Series(name="scale", x=np.array(steps), y=np.array(scales, dtype=np.float64), colour=SEQUENCE[5])
    return draw([line], x="step", y="scale after an overflow", height=HEIGHT, log=True)


def compression(columns: Mapping[str, Any]) -> Figure:
    """Columns step, error (relative, L2)."""
    line = Series(name="error", x=ints(columns["step"]), y=floats(columns["error"]), colour=SEQUENCE[3])
    return draw([line], x="step", y="relative error", height=HEIGHT, from_zero=True)


def experts(columns: Mapping[str, Any]) -> Figure:
    """Columns step, high, low: load of the most and the least used expert, in multiples of an even share."""
    lines = [
        Series(name=name, x=ints(columns["step"]), y=floats(columns[column]), colour=colour)
        for name, column, colour in (("most used", "high", SEQUENCE[5]), ("least used", "low", SEQUENCE[2]))
    ]
    return draw(lines, x="step", y="times an even share", height=HEIGHT, from_zero=True)


def logged(columns: Mapping[str, Any]) -> Figure:
    """Columns name, step, value: one line per scalar that the user logged."""
    names = np.asarray(columns["name"])
    steps, values = ints(columns["step"]), floats(columns["value"])
    lines = [
        Series(name=name, x=steps[names == name], y=values[names == name]) for name in dict.fromkeys(names.tolist())
    ]
    return draw(lines, x="step", y="value", height=HEIGHT)


def memory(columns: Mapping[str, Any]) -> Figure:
    """Columns step, low, middle, high: minimum, median and maximum over the ranks, MiB."""
    low, middle, high = (floats(columns[name]) for name in ("low", "middle", "high"))
    return band(ints(columns["step"]), low, middle, high, x="step", y="memory (MiB)", height=340)


def two_ranks(pair: Mapping[str, Any], a: int, b: int, measure: str, unit: str) -> Figure:
    """Columns step, a, b: one measure for two ranks over the steps, in its unit."""
    steps = ints(pair["step"])
    lines = [
        Series(name=f"rank {a}", x=steps, y=floats(pair["a"]), colour=SEQUENCE[1]),
        Series(name=f"rank {b}", x=steps, y=floats(pair["b"]), colour=SEQUENCE[0]),
    ]
    figure = draw(lines, x="step", y=f"{measure} ({unit})", from_zero=measure != "memory")
    if measure != "memory":
        limit_start(figure, steps, [line.y for line in lines], unit=unit)
    return figure
