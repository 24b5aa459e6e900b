"""Charts that are built once: while what a chart shows is the same, its finished form is given again.

    figure_json = drawn(("demo", "overview-loss"), loss.draw, (curve, marks, findings), {}, dark=False)

A page runs every two seconds, and most of its charts show what they showed before. Plotly takes 40 to 100 ms to build
and check a figure, and Streamlit sends to the browser only what differs from what it sent before. So the finished JSON
is kept with the answers that it was built from; answers are the same objects until the store has changed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import plotly.graph_objects as go
import plotly.io

from analyzers.figures.theme import template

__all__ = ["drawn"]

MAX_KEPT = 96
"""Charts that are kept, those of the last pages; the largest, a heatmap, is 1 MB."""
_PLAIN = (str, int, float, bool, tuple, list, dict)


_kept: OrderedDict[Hashable, tuple[tuple[Any, ...], str]] = OrderedDict()
_lock = threading.Lock()


def drawn(
    name: Hashable,
    draw: Callable[..., go.Figure],
    shown: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    dark: bool,
    selected: tuple[Hashable, ...] = (),
) -> str:
    """The JSON of `draw(*shown, **options)` in its theme, or what it was before if all of `shown` are the same.

    `selected`: what the reader has chosen to see. A zoom stays while the data of the same choice grow, and goes with
    another choice: it would show an empty place of other data.
    """
    asked = (*shown, *options.values(), *selected)
    with _lock:
        former = _kept.get((name, dark))
        if former is not None and len(former[0]) == len(asked) and all(map(_alike, former[0], asked)):
            _kept.move_to_end((name, dark))
            return former[1]
    spec = draw(*shown, **options).to_dict()
    spec["layout"]["template"] = template(dark=dark)
    spec["layout"]["uirevision"] = str((name, selected))
    figure: str = plotly.io.to_json(spec, validate=False)
    with _lock:
        _kept[(name, dark)] = (asked, figure)
        while len(_kept) > MAX_KEPT:
            _kept.popitem(last=False)
    return figure


def _alike(a: Any, b: Any) -> bool:
    """The same object, or equal ones of a kind that can be compared at once; arrays are the former only."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and isinstance(a, _PLAIN) and bool(a == b)
    except ValueError:  # an array within
        return False
