"""A chart stays the same element when its data change, so that the browser keeps the reader's zoom.

    keep_charts()          # once, before the first chart

Streamlit (1.67) makes the id of a Plotly chart from its key and from its data. New data are then a new element,
which the browser draws from nothing: the zoom is gone at each refresh, `uirevision` or not. For other elements a key
alone is their identity (`key_as_main_identity`); here it becomes so for charts. Where Streamlit has changed, nothing is
touched and only the zoom is lost; `tests/dashboard/test_browser.py` tells.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from streamlit.elements import plotly_chart

__all__ = ["keep_charts"]

_NAME = "compute_and_register_element_id"


def keep_charts() -> None:
    """Let a chart with a key be known by it. Calling it again changes nothing."""
    inner = getattr(plotly_chart, _NAME, None)
    if inner is None or hasattr(inner, "__wrapped__"):
        return
    if not {"user_key", "key_as_main_identity"} <= set(inspect.signature(inner).parameters):
        return

    @wraps(inner)
    def by_key(*arguments: Any, **named: Any) -> Any:
        if named.get("user_key") is not None:
            named["key_as_main_identity"] = True
        return inner(*arguments, **named)

    setattr(plotly_chart, _NAME, by_key)
