"""The zoom of a chart in the address: `zoom-overview-loss=x~20~60~y2~0~3`.

    zoom.in_address("timeline", selected=(0, 12))       # {"xaxis": (10.0, 35.5)}; empty: no zoom
    zoom.into_address("timeline", (0, 12), {"xaxis": [10, 35.5]})

A zoom applies to what was selected at the time (steps, ranks, a measure). It starts with a short digest of the
selection, and is ignored for another selection.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Hashable, Mapping
from typing import Any

import streamlit as st

__all__ = ["in_address", "into_address"]

Zoom = dict[str, tuple[float, float]]
MAX_AXES = 12
_AXIS = re.compile(r"[xy](?:[2-9]|[1-9]\d)?")


def in_address(key: str, selected: tuple[Hashable, ...]) -> Zoom:
    """{axis: range} of the chart, as `Plotly` names its axes."""
    digest, *parts = st.query_params.get(_name(key), "").split("~")
    if digest != _digest(selected) or len(parts) % 3 or len(parts) > 3 * MAX_AXES:
        return {}
    zoom: Zoom = {}
    for axis, low, high in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        bounds = _bounds([low, high])
        if _AXIS.fullmatch(axis) and bounds is not None:
            zoom[f"{axis[0]}axis{axis[1:]}"] = bounds
    return zoom


def into_address(key: str, selected: tuple[Hashable, ...], ranges: Mapping[str, Any]) -> None:
    """Write the zoomed ranges to the address; without ranges, remove the chart's zoom from it."""
    parts = [_digest(selected)]
    for name, range_of_axis in sorted(ranges.items())[:MAX_AXES]:
        axis, bounds = name.replace("axis", ""), _bounds(range_of_axis)
        if _AXIS.fullmatch(axis) and bounds is not None:
            parts += [axis, *(f"{bound:.8g}" for bound in bounds)]
    if len(parts) > 1:
        st.query_params[_name(key)] = "~".join(parts)
    elif _name(key) in st.query_params:
        del st.query_params[_name(key)]


def _name(key: str) -> str:
    return f"zoom-{key}"


def _digest(selected: tuple[Hashable, ...]) -> str:
    return hashlib.blake2s(repr(selected).encode(), digest_size=3).hexdigest() if selected else "all"


def _bounds(values: Any) -> tuple[float, float] | None:
    """Return two different finite numbers; None for anything else, such as dates of a time axis."""
    try:
        low, high = (float(value) for value in values)
    except (TypeError, ValueError):
        return None
    return (low, high) if math.isfinite(low) and math.isfinite(high) and low != high else None
