"""Draw a finding with the figures of its plug-in.

for drawing in draw(store, finding): ...
"""

from __future__ import annotations

from collections.abc import Iterator

import plotly.graph_objects as go

from analyzers.figures.not_drawn import not_drawn
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.plugins import plugin_of
from analyzers.source import Source
from store.plugins import PluginError

__all__ = ["draw"]


def draw(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Its figures of a finding, or one that says why there are none."""
    plugin = plugin_of(finding.kind)
    if plugin is None or finding.kind not in plugin.explains.get("FIGURES", ()):
        return
    try:
        for told in plugin.process.call("draw", finding, source=source):
            yield Drawing(title=told["title"], figure=go.Figure(told["figure"]))
    except (PluginError, ValueError) as error:
        yield not_drawn(f"plug-in {plugin.name}", str(error))
