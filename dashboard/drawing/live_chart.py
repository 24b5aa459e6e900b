"""A Plotly chart that is updated in place: new data change its lines and keep zoom and hidden lines.

    prepare()                                    # once in each run of the script
    show_in_place(figure_json, key="loss", config={...}, what="Loss over the steps", zoomed={}, on_zoom=keep)

Streamlit's Plotly chart creates a new element when its data change, which loses the zoom at each refresh; with a fixed
id it keeps showing its first figure. Here the element is identified by its key, and each new figure is passed to
`Plotly.react`, which keeps the user's changes as long as `uirevision` is the same. A zoom is reported to the page. The
page writes it to the address, and passes it back with the figure. So the Back button and other browsers show the same
zoom. plotly.js is served from the Python package. If it does not load, the chart shows an error and retries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import plotly
import streamlit as st
from streamlit.components import v1, v2

__all__ = ["prepare", "show_in_place"]

_NAME = "rankscope_chart"
_PACKAGE_DATA = Path(plotly.__file__).parent / "package_data"
_LIBRARY_JS = """
function library(url) {
  window.rankscopePlotly ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = url;
    script.onload = done;
    script.onerror = () => {
      window.rankscopePlotly = undefined;  // the next chart loads it again
      script.remove();
      failed(new Error("plotly.js did not load from " + url));
    };
    document.head.append(script);
  });
  return window.rankscopePlotly;
}
"""
_LOADER_JS = _LIBRARY_JS + "export default function ({ data }) { library(data).catch(() => {}); }"
_JS = (
    _LIBRARY_JS
    + """
const AXIS = /^([xy]axis\\d*)(?:\\.(?:range|autorange).*)?$/;

function follow(host) {  // reports the user's zoom: all axes whose range differs from the figure's
  host.on("plotly_relayout", (changed) => {
    const names = Object.keys(changed).filter((name) => name.includes(".") && AXIS.test(name));
    if (!names.length) return;
    for (const name of new Set(names.map((name) => name.match(AXIS)[1]))) {
      const { autorange, range } = host._fullLayout[name];
      if (autorange) delete host.zoomed[name];
      else host.zoomed[name] = range.map(Number);
    }
    host.zoom({ ...host.zoomed });
  });
  host.on("plotly_doubleclick", () => host.zoom({}));
}

function zoomTo(layout, zoomed) {
  for (const [name, range] of Object.entries(zoomed)) layout[name] = { ...layout[name], range, autorange: false };
  for (const name of new Set(["xaxis", "yaxis", ...Object.keys(layout)]))
    if (AXIS.test(name)) layout[name] = { ...layout[name], uirevision: layout.uirevision + JSON.stringify(zoomed) };
}

function fit(host) {  // on a narrow screen the legend takes more rows: enlarge the figure, not to shrink the plot
  const { data, layout, height } = host.newest;
  const named = data.filter((trace) => trace.name && trace.showlegend !== false).length;
  const rows = host.clientWidth < 600 && layout.showlegend !== false ? Math.max(0, named - 3) : 0;
  layout.height = height + 14 * rows;
  host.style.height = layout.height + "px";
}

const HELD_MS = 10_000;

function held() {  // newest zooms by chart: a redraw from the previous address must not undo them
  if (!window.rankscopeZooms) {
    window.rankscopeZooms = new Map();
    window.addEventListener("popstate", () => window.rankscopeZooms.clear());  // Back leads to another zoom
  }
  return window.rankscopeZooms;
}

export default function ({ data, parentElement, setTriggerValue }) {
  const host = parentElement.querySelector(".rankscope-chart");
  const { key, figure, config, alt, url, clickable, zoomed } = JSON.parse(new TextDecoder().decode(data));
  host.setAttribute("aria-label", alt);
  host.newest = { ...figure, height: figure.layout.height };
  fit(host);
  host.click = (point) => setTriggerValue("point", point);
  const revision = figure.layout.uirevision, page = location.pathname;
  host.zoom = (ranges) => {
    held().set(key, { ranges, revision, until: performance.now() + HELD_MS });
    setTriggerValue("zoom", ranges);
  };
  const newest = held().get(key);
  const isHeld = newest?.revision === revision && performance.now() < newest.until;
  host.zoomed = { ...(isHeld ? newest.ranges : zoomed) };
  zoomTo(figure.layout, host.zoomed);
  const draw = () => library(url).then(() => {
    if (host.newest.data !== figure.data || !host.isConnected) return;
    if (host._dragging) {  // set by Plotly: drawing now would abort the user's zoom
      setTimeout(draw, 100);
      return;
    }
    if (host.failed) host.replaceChildren();
    host.failed = false;
    const reset = { name: "Reset zoom", icon: window.Plotly.Icons.home, click: () => host.zoom({}) };
    window.Plotly.react(host, figure.data, figure.layout, { ...config, modeBarButtonsToAdd: [reset] });
    if (!host.followed) {
      follow(host);
      if (clickable) host.on("plotly_click", ({ points: [{ x, y, customdata }] }) =>
        host.click({ x, y: customdata?.[0] ?? y }));
      host.followed = true;
    }
    if (!host.sized) {
      host.sized = new ResizeObserver(() => {
        if (!host.isConnected) return;
        fit(host);
        window.Plotly.Plots.resize(host);
      });
      host.sized.observe(host);
    }
  }).catch((error) => {
    if (host.newest.data !== figure.data || !host.isConnected) return;
    console.error(error);
    host.failed = true;
    window.Plotly?.purge(host);
    const message = document.createElement("p");
    message.setAttribute("role", "alert");
    message.textContent = `This chart could not be drawn: ${error.message}. The page retries every few seconds.`;
    host.replaceChildren(message);
    setTimeout(() => host.newest.data === figure.data && host.isConnected && draw(), 5000);
  });
  draw();
  return () => setTimeout(() => {
    if (host.isConnected) return;
    host.sized?.disconnect();
    if (location.pathname !== page) held().delete(key);
    window.Plotly?.purge(host);
  });
}
"""
)


_chart = v2.component(_NAME, html='<div class="rankscope-chart" role="figure"></div>', js=_JS, isolate_styles=False)
_loader = v2.component(f"{_NAME}_library", html="<span></span>", js=_LOADER_JS, isolate_styles=False)
_URL = f"component/{__name__}.plotly/plotly.min.js"


def prepare() -> None:
    """Make the server serve plotly.js, and the browser load it while the page's queries run."""
    v1.declare_component("plotly", path=str(_PACKAGE_DATA))
    with st.container(key="chart-library"):  # hidden by the style sheet
        _loader(key="library", data=_URL)


def show_in_place(
    figure_json: str,
    *,
    key: str,
    config: dict[str, Any],
    what: str,
    zoomed: Mapping[str, tuple[float, float]],
    on_zoom: Callable[[Mapping[str, Any]], None],
    clickable: bool = False,
) -> dict[str, Any] | None:
    """Draw a figure (Plotly's JSON, with its height); `what` is the text for screen readers.

    `zoomed`: axis ranges; after a zoom, `on_zoom` is called with all of them before the page is drawn. If `clickable`,
    returns {"x", "y"} of the mark that was just clicked. If the mark has custom data, y is the first value of these.
    """
    shown = {"key": key, "config": config, "alt": what, "url": _URL, "clickable": clickable, "zoomed": zoomed}
    rest = json.dumps(shown)
    data = f'{{"figure": {figure_json}, {rest[1:]}'.encode()

    def zoom() -> None:
        ranges = st.session_state[key].get("zoom")
        on_zoom(ranges if isinstance(ranges, Mapping) else {})

    point = _chart(key=key, data=data, on_point_change=_nothing, on_zoom_change=zoom).point
    return dict(point) if isinstance(point, Mapping) else None


def _nothing() -> None:
    """Do nothing: clicks are handled where the chart is drawn."""
