"""Theme of the figures: colours, the light and the dark template, and escaped text.

    figure = new_figure(height=320, x="step", y="loss (nat)")
    figure.update_layout(template=template(dark=True))

The colours were found by a search that started from Okabe and Ito's palette. Any two that are drawn together differ by
at least 15 (CIE 1976), also with any of the three forms of dichromacy (Machado, Oliveira and Fernandes 2009, severity
1), and all are visible on white and on near-black. A test computes it.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from probes.tape.redaction.printable import visible

__all__ = [
    "ACCUSED",
    "CALL",
    "CATEGORY",
    "DASHES",
    "HEAT",
    "PHASE",
    "SEQUENCE",
    "SEVERITY",
    "contrast",
    "heat_range",
    "ink",
    "label",
    "new_figure",
    "template",
    "tint",
]

_GREEN, _SKY, _BLUE, _ORANGE, _PINK = "#058f67", "#80ceff", "#5a9de3", "#e1972b", "#cb7bb7"
_VIOLET, _TEAL, _RUST, _BROWN, _RED = "#6a66c8", "#78ab9b", "#c86930", "#87462b", "#d1485b"
_LIGHT, _PALE, _SLATE, _GREY = "#e0ddd5", "#b5c8d9", "#454f5b", "#747583"
_PURPLE, _PLUM, _NAVY, _KHAKI, _SAND = "#8418e4", "#5a1470", "#24279e", "#b8b088", "#f1c26b"

SEQUENCE = (_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _VIOLET, _RUST, _GREY)
DASHES = ("solid", "dash", "dot")
"""Dash of each group of eight lines, which use the colours of `SEQUENCE`."""
CALL = {
    "all_gather": _BLUE, "reduce_scatter": _VIOLET, "all_reduce": _TEAL, "broadcast": _LIGHT, "barrier": _BROWN,
    "all_to_all": _RUST, "send": _PALE, "recv": _GREY,
}  # fmt: skip
"""Colours of collectives by operation. In a timeline their lane is below the lane of the phases."""
SEVERITY = {"critical": _RED, "warning": _ORANGE, "info": _BLUE}
ACCUSED = (_ORANGE, _RED, _VIOLET, _RUST)
"""Colours of the ranks and devices that a finding names, against the blue of the others."""
CATEGORY = {
    "training": _GREEN, "data": _SKY, "communication": _BLUE, "straggler": _ORANGE, "bubble": _PINK,
    "checkpoint": _VIOLET, "evaluation": _TEAL, "recomputed": _RUST, "restart": _BROWN, "hang": _RED,
    "stopped": _LIGHT, "startup": _PALE, "shutdown": _SLATE, "other": _GREY, "gaps": _PURPLE, "unmeasured": _PLUM,
    "device": _NAVY, "in_flight": _KHAKI, "host_late": _SAND,
}  # fmt: skip
"""Colours of goodput's categories."""
PHASE = {
    "data": _SKY, "forward": _GREEN, "loss": _ORANGE, "backward": _TEAL, "weight": _SLATE, "optimizer": _PINK,
    "checkpoint": _VIOLET, "evaluate": _RUST, "reduce": _BLUE, "send": _PALE, "recv": _GREY,
    "gaps": _PURPLE,
}  # fmt: skip
"""Colours of spans by kind, and of the time between phases."""
HEAT = "Viridis"
MIN_HEAT_RANGE = 0.05
"""Minimum range of a colour scale relative to the values: differences of a few percent are chance."""
_EXCESS = {
    False: [[0, "#eef1f5"], [0.19, "#e3e8ee"], [0.21, "#fbe3b4"], [0.45, "#f5a33d"], [0.7, "#d9482b"], [1, "#7a0c2e"]],
    True: [[0, "#10151c"], [0.19, "#1b232d"], [0.21, "#4a2a12"], [0.45, "#a34a12"], [0.7, "#f0862b"], [1, "#ffe9a8"]],
}
"""Default colours of an excess, for a light (False) and a dark (True) page; the first fifth is noise, in the background
colour."""
_INKS = ("#ffffff", "#000000")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MAX_LABEL = 80


def label(text: object, limit: int = MAX_LABEL) -> str:
    """Make text from a run safe for a figure: no control characters, no Plotly markup, at most `limit` characters."""
    shown = visible(str(text)[: 4 * limit])
    shown = shown if len(shown) <= limit else shown[: limit - 1] + "…"
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def ink(colour: str) -> str:
    """White or black, whichever is more readable on a colour `#rrggbb`; the contrast is always at least 4.5."""
    return max(_INKS, key=lambda one: contrast(one, colour))


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours `#rrggbb`, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = []
    for i in (1, 3, 5):
        value = int(colour[i : i + 2], 16) / 255
        linear.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def heat_range(low: float, high: float) -> tuple[float, float]:
    """Ends of a colour scale, apart by at least `MIN_HEAT_RANGE` of the values, so that noise looks uniform."""
    middle, half = (low + high) / 2, (high - low) / 2
    half = max(half, MIN_HEAT_RANGE * abs(middle) / 2, 1e-6)
    return middle - half, middle + half


def tint(colour: str, opacity: float) -> str:
    """Make a colour `#rrggbb` translucent."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def new_figure(*, height: int = 320, x: str = "", y: str = "", **layout: Any) -> go.Figure:
    """An empty figure with titles for its axes, without a template. `height` is in pixels."""
    figure = go.Figure(
        layout={
            "template": {},  # an empty template, because Plotly copies its large default template into every figure
            "height": height,
            "margin": {"l": 64, "r": 24, "t": 24, "b": 48},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
            "hovermode": "closest",
            "xaxis": {"title": {"text": x}},
            "yaxis": {"title": {"text": y}},
        }
    )
    figure.layout.template = None
    figure.update_layout(**layout)
    return figure


def template(*, dark: bool) -> dict[str, Any]:
    """Layout template for every figure."""
    text, grid, line = ("#d7dde6", "#2b333f", "#414b59") if dark else ("#2b3440", "#e8ebf0", "#c9d0da")
    axis = {
        "gridcolor": grid, "linecolor": line, "zeroline": False, "tickcolor": line, "automargin": True,
        "title": {"standoff": 10, "font": {"size": 12}}, "tickfont": {"size": 11},
    }  # fmt: skip
    return {
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "size": 12, "color": text},
            "colorway": list(SEQUENCE),
            # Without this distance, the first labels of the two axes touch each other, and labels of bars the bars.
            "xaxis": axis | {"ticklabelstandoff": 4},
            "yaxis": axis | {"ticklabelstandoff": 4},
            "hoverlabel": {
                "bgcolor": "#1b222c" if dark else "#ffffff", "bordercolor": line,
                "font": {"color": text, "family": FONT, "size": 12}, "align": "left",
            },
            "legend": {"font": {"size": 11}, "bgcolor": "rgba(0,0,0,0)", "maxheight": 0.9},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": line, "activecolor": text},
            "annotationdefaults": {"font": {"color": text, "size": 11}, "arrowcolor": line},
        },
        "data": {"heatmap": [{"type": "heatmap", "colorscale": _EXCESS[dark]}]},
    }  # fmt: skip
