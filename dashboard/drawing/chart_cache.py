"""Cache of figures as JSON: a chart is built again only when its data have changed.

    figure_json = cached_figure(("demo", "overview-loss"), loss.draw, (curve, marks, findings), {}, dark=False)

A page is drawn every two seconds, and most of its charts have not changed. Plotly takes 40 to 100 ms to build and
validate a figure, and Streamlit sends only changed elements to the browser. So the JSON is kept together with the
answers from which it was built; answers are the same objects until the store changes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import plotly.graph_objects as go
import plotly.io

from analyzers.figures.drawing.theme import template

__all__ = ["cached_figure"]

MAX_KEPT = 96
"""Number of most recent charts that are kept; the largest, a heatmap, is 1 MB."""
_PLAIN = (str, int, float, bool, tuple, list, dict)


_kept: OrderedDict[Hashable, tuple[tuple[Any, ...], str]] = OrderedDict()
_lock = threading.Lock()


def cached_figure(
    name: Hashable,
    draw: Callable[..., go.Figure],
    shown: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    dark: bool,
    selected: tuple[Hashable, ...] = (),
) -> str:
    """JSON of `draw(*shown, **options)` in the given theme, from the cache if all of `shown` are unchanged.

    `selected`: the user's choice. The zoom is kept while the data of the same choice grow, and reset for another
    choice, because it might show an empty range there.
    """
    inputs = (*shown, *options.values(), *selected)
    with _lock:
        former = _kept.get((name, dark))
        if former is not None and len(former[0]) == len(inputs) and all(map(_is_same, former[0], inputs)):
            _kept.move_to_end((name, dark))
            return former[1]
    spec = draw(*shown, **options).to_dict()
    spec["layout"]["template"] = template(dark=dark)
    spec["layout"]["uirevision"] = str((name, selected))
    figure: str = plotly.io.to_json(spec, validate=False)
    with _lock:
        _kept[(name, dark)] = (inputs, figure)
        while len(_kept) > MAX_KEPT:
            _kept.popitem(last=False)
    return figure


def _is_same(a: Any, b: Any) -> bool:
    """True for the same object, or for equal values of plain types; arrays are compared by identity only."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and isinstance(a, _PLAIN) and bool(a == b)
    except ValueError:  # the values contain an array, whose comparison has no single truth value
        return False
