"""How figures look: colours, the light and the dark template, and text that a figure shows and never obeys.

    figure = new_figure(height=320, x="step", y="loss (nat)")
    figure.update_layout(template=template(dark=True))

The colours are Okabe and Ito's, which people who see fewer colours can tell apart, moved a little so that they stand
on white and on near-black.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from ..text import visible

__all__ = [
    "ACCUSED",
    "CALL",
    "CATEGORY",
    "HEAT",
    "PHASE",
    "SEQUENCE",
    "SEVERITY",
    "label",
    "new_figure",
    "template",
    "tint",
]

_BLUE, _SKY, _GREEN, _ORANGE = "#2f7fc1", "#6bb8e8", "#1f9e78", "#e0962a"
_RED, _PINK, _GREY, _PALE = "#d1495b", "#c06c9e", "#8a94a3", "#b7bec9"
_VIOLET, _RUST = "#7a6fd0", "#c8692f"

SEQUENCE = (_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _VIOLET, _RUST, _GREY)
CALL = {
    "all_gather": _BLUE, "reduce_scatter": "#a493e6", "all_reduce": "#3aa7b4", "broadcast": _PALE, "barrier": _GREY,
    "all_to_all": _RUST, "send": "#9fb4c8", "recv": "#6f8296",
}  # fmt: skip
"""Colours of collectives by operation."""
SEVERITY = {"critical": _RED, "warning": _ORANGE, "info": _BLUE}
ACCUSED = (_ORANGE, _RED, _VIOLET, _RUST)
"""Colours of what a finding names, before the blue of the others."""
CATEGORY = {
    "training": _GREEN, "data": _SKY, "communication": _BLUE, "straggler": _ORANGE, "bubble": _PINK,
    "checkpoint": _VIOLET, "evaluation": "#4aa3a2", "recomputed": _RUST, "restart": "#a8524c", "hang": _RED,
    "stopped": "#c9ced6", "startup": _PALE, "shutdown": "#9aa3b0", "other": _GREY,
}  # fmt: skip
"""Colours of goodput's categories."""
PHASE = {
    "data": _SKY, "forward": _GREEN, "loss": "#54b88f", "backward": "#15745a", "weight": "#2d8f86",
    "optimizer": _PINK, "checkpoint": _VIOLET, "evaluate": "#4aa3a2", "reduce": _BLUE, "send": _PALE, "recv": _GREY,
}  # fmt: skip
"""Colours of spans by kind."""
HEAT = "Viridis"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MAX_LABEL = 80


def label(text: object, limit: int = MAX_LABEL) -> str:
    """Text from a run for a figure: no control signs, no markup that Plotly would obey, never longer than `limit`."""
    shown = visible(str(text)[: 4 * limit])
    shown = shown if len(shown) <= limit else shown[: limit - 1] + "…"
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def tint(colour: str, opacity: float) -> str:
    """A colour `#rrggbb` that lets the background through."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def new_figure(*, height: int = 320, x: str = "", y: str = "", **layout: Any) -> go.Figure:
    """An empty figure with titles for its axes, in pixels, without a template."""
    figure = go.Figure(layout={"height": height, "margin": {"l": 64, "r": 24, "t": 24, "b": 48}})
    figure.layout.template = None  # else Plotly's own travels with every figure
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"})
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(title={"text": x})
    figure.update_yaxes(title={"text": y})
    figure.update_layout(**layout)
    return figure


def template(*, dark: bool) -> dict[str, Any]:
    """The look of every figure, as the layout's template."""
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
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {
                "bgcolor": "#1b222c" if dark else "#ffffff", "bordercolor": line,
                "font": {"color": text, "family": FONT, "size": 12}, "align": "left",
            },
            "legend": {"font": {"size": 11}, "bgcolor": "rgba(0,0,0,0)", "maxheight": 0.9},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": line, "activecolor": text},
            "annotationdefaults": {"font": {"color": text, "size": 11}, "arrowcolor": line},
        }
    }  # fmt: skip
