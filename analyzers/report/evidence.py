"""The figures that prove a finding.

    for drawing in drawings(store, finding):
        drawing.title, drawing.figure           # "Own work of rank 3 against the others", a Plotly figure

The HTML report and the dashboard show the same ones. Each package of `analyzers` draws its own kinds, in
`figures.FIGURES`. A figure whose records are missing is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence

from analyzers.figures.moment import moment
from analyzers.figures.not_drawn import not_drawn
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.kinds import KINDS
from analyzers.report.plugin_figures import draw as draw_by_plugin
from analyzers.source import Source

__all__ = ["Drawing", "drawings", "figures_of", "moment"]

Figures = Sequence[Callable[[Source, Finding], Iterator[Drawing]]]


def drawings(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Figures for one finding, the most telling first."""
    for draw in figures_of(finding.kind):
        try:
            yield from draw(source, finding)
        except Exception as error:  # one figure that fails must not cost the page
            yield not_drawn(finding.kind, f"{type(error).__name__}: {error}")


def figures_of(kind: str) -> Figures:
    """The functions that draw a kind; empty for one that is not drawn, or not known."""
    known = KINDS.get(kind)
    if known is None or not known.drawn:
        return ()
    if not known.package:
        return (draw_by_plugin,)
    found: Figures = importlib.import_module(f"analyzers.{known.package}.figures").FIGURES[kind]
    return found
