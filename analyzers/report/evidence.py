"""The figures that prove a finding.

    for drawing in drawings(store, finding):
        drawing.title, drawing.figure           # "Own work of rank 3 against the others", a Plotly figure

The HTML report and the dashboard show the same figures. Each package of `analyzers` lists the functions for its kinds
in `figures.FIGURES`. A figure without records is left out.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.time.moment import moment
from analyzers.finding import Finding
from analyzers.kinds import KINDS
from analyzers.plugins import plugin_of
from analyzers.source import Source
from store.plugins import PluginError

__all__ = ["Drawing", "drawings", "figures_of", "moment"]

Figures = Sequence[Callable[[Source, Finding], Iterator[Drawing]]]


def drawings(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Figures for one finding, most informative first."""
    for draw in figures_of(finding.kind):
        try:
            yield from draw(source, finding)
        except Exception as error:  # one figure that fails must not make the page fail
            yield reason_as_figure(finding.kind, f"{type(error).__name__}: {error}")


def figures_of(kind: str) -> Figures:
    """Functions that draw figures of a kind; empty if the kind has no figures or is unknown."""
    known = KINDS.get(kind)
    if known is None or not known.drawn:
        return ()
    if not known.package:
        return (_of_plugin,)
    found: Figures = importlib.import_module(f"analyzers.{known.package}.figures").FIGURES[kind]
    return found


def _of_plugin(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Return the figures of a plug-in's finding; if drawing fails, one figure with the reason."""
    plugin = plugin_of(finding.kind)
    if plugin is None or finding.kind not in plugin.explains.get("FIGURES", ()):
        return
    try:
        yield from plugin.process.call("draw", finding, source=source, form=_drawings)
    except (PluginError, ValueError) as error:
        yield reason_as_figure(f"plug-in {plugin.name}", str(error))


def _drawings(answer: Any) -> list[Drawing]:
    return [Drawing(title=str(drawn["title"]), figure=go.Figure(drawn["figure"])) for drawn in answer]


def reason_as_figure(source_name: str, reason: str) -> Drawing:
    """Return an empty figure that shows why nothing was drawn; `source_name`: the analysis or plug-in."""
    figure = go.Figure()
    figure.add_annotation(text=html.escape(reason)[:300], showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
    figure.update_layout(height=120, xaxis_visible=False, yaxis_visible=False)
    return Drawing(title=f"The figure for {source_name} could not be drawn", figure=figure)
