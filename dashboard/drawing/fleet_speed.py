"""Chart of the runs of one configuration in order of start: each run's speed, and the medians between changes.

figure = speed_history(configuration)
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from plotly.graph_objects import Figure

from analyzers.figures.drawing.series import Series, draw
from analyzers.fleet.speed_changes import ConfigurationSpeed

__all__ = ["speed_history"]


def speed_history(configuration: ConfigurationSpeed) -> Figure:
    """Draw the speed of each run; runs are numbered from 1."""
    speeds = np.array(configuration.speeds)
    medians = np.empty_like(speeds)
    bounds = [0, *(change.index for change in configuration.changes), len(speeds)]
    for begin, end in pairwise(bounds):
        medians[begin:end] = np.median(speeds[begin:end])
    number = np.arange(1, len(speeds) + 1)
    lines = [Series(name="run", x=number, y=speeds), Series(name="median", x=number, y=medians)]
    return draw(lines, x="run", y=configuration.unit)
