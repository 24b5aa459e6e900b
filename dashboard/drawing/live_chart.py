"""A chart that is changed in place: new data move its lines, while the reader's zoom and hidden lines stay.

    prepare()                                    # once in each run of the script
    show_in_place(figure_json, key="loss", config={...}, what="Loss over the steps")

Streamlit's own Plotly chart draws a new element from nothing when its data are new, so that the zoom is gone at each
refresh; and while its id is the same it keeps the figure that it was given first. Here the element is known by its key,
and each new figure goes to `Plotly.react`, which keeps what the reader has changed as long as `uirevision` is the same.
plotly.js is the one that the Python package brings, served from there. If it does not come, the chart's place says so,
and it is asked for again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plotly
from streamlit.components import v1, v2

__all__ = ["prepare", "show_in_place"]

_NAME = "rankscope_chart"
_PACKAGE_DATA = Path(plotly.__file__).parent / "package_data"
_JS = """
function library(url) {
  window.rankscopePlotly ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = url;
    script.onload = done;
    script.onerror = () => {
      window.rankscopePlotly = undefined;  // the next one asks anew
      script.remove();
      failed(new Error("plotly.js did not load from " + url));
    };
    document.head.append(script);
  });
  return window.rankscopePlotly;
}

export default function ({ data, parentElement }) {
  const host = parentElement.querySelector(".rankscope-chart");
  const { figure, config, alt, url } = JSON.parse(new TextDecoder().decode(data));
  host.setAttribute("aria-label", alt);
  // On a narrow screen the legend takes more rows: the picture grows by them, and its plot stays.
  const named = figure.data.filter((trace) => trace.name && trace.showlegend !== false).length;
  if (parentElement.clientWidth < 600 && figure.layout.showlegend !== false && named > 3)
    figure.layout.height += 14 * (named - 3);
  host.style.height = figure.layout.height + "px";
  host.newest = figure;
  const draw = () => library(url).then(() => {
    if (host.newest !== figure || !host.isConnected) return;
    if (host.failed) host.replaceChildren();
    host.failed = false;
    window.Plotly.react(host, figure.data, figure.layout, config);
    if (!host.sized) {
      host.sized = new ResizeObserver(() => host.isConnected && window.Plotly.Plots.resize(host));
      host.sized.observe(host);
    }
  }).catch((error) => {
    if (host.newest !== figure || !host.isConnected) return;
    console.error(error);
    host.failed = true;
    window.Plotly?.purge(host);
    const said = document.createElement("p");
    said.setAttribute("role", "alert");
    said.textContent = `This chart could not be drawn: ${error.message}. It is tried again every few seconds.`;
    host.replaceChildren(said);
    setTimeout(() => host.newest === figure && host.isConnected && draw(), 5000);
  });
  draw();
  return () => setTimeout(() => {
    if (host.isConnected) return;
    host.sized?.disconnect();
    window.Plotly?.purge(host);
  });
}
"""


_chart = v2.component(_NAME, html='<div class="rankscope-chart" role="figure"></div>', js=_JS, isolate_styles=False)


def prepare() -> None:
    """Let the server give plotly.js to the page."""
    v1.declare_component("plotly", path=str(_PACKAGE_DATA))


def show_in_place(figure_json: str, *, key: str, config: dict[str, Any], what: str) -> None:
    """The figure (Plotly's JSON, with its height); `what` is for those who cannot see."""
    rest = json.dumps({"config": config, "alt": what, "url": f"component/{__name__}.plotly/plotly.min.js"})
    _chart(key=key, data=f'{{"figure": {figure_json}, {rest[1:]}'.encode())
