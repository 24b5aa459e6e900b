"""Draw a picture of each Grafana dashboard, with its panels in place, from Prometheus' answers.

    python -m benchmarks.scale.panels runs/latest --pictures pictures

This needs no Grafana: Rankscope's figures draw numbers, lines, states, heatmaps and tables in a headless Chromium. A
picture shows the results of the queries, their legends and the layout, but not Grafana's style.
"""

from __future__ import annotations

import html
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.offline
from plotly.graph_objects import Figure

from analyzers.figures.drawing.series import Series, draw
from analyzers.figures.drawing.theme import new_figure
from dashboard.screenshots import browser_path

__all__ = ["Answer", "board_page", "picture", "range_query"]

WIDTH, CELL, UNIT = 1440, 60, 30
"""Sizes in pixels: the picture, one of its 24 columns, a unit of height."""
MAX_ROWS = 8
_HIDDEN = ("__name__", "job", "instance", "run_id", "node")


@dataclass(frozen=True, slots=True)
class Answer:
    """One series: labels, times (epoch seconds) and values."""

    labels: Mapping[str, str]
    times: Sequence[float]
    values: Sequence[float]


def range_query(port: int, query: str, *, begin_s: float, end_s: float) -> list[Answer]:
    """Run a range query with a step of one second; return its series."""
    parameters = {"query": query, "start": begin_s, "end": end_s, "step": "1s"}
    url = f"http://127.0.0.1:{port}/api/v1/query_range?" + urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(url, timeout=60) as found:
        series = json.load(found)["data"]["result"]
    return [
        Answer(one["metric"], [float(at) for at, _ in one["values"]], [float(value) for _, value in one["values"]])
        for one in series
    ]


def name_of(legend: str, labels: Mapping[str, str]) -> str:
    """The legend with the labels filled in; without a legend, the labels."""
    if legend and legend != "__auto":
        return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), legend).strip()
    return ", ".join(f"{name} {value}" for name, value in labels.items() if name not in _HIDDEN)


def board_page(board: Mapping[str, Any], answers: Mapping[int, Sequence[tuple[str, Answer]]]) -> str:
    """HTML of a dashboard; `answers`: {index of the panel: (legend, series)}."""
    parts, bottom = [], 0
    for number, panel in enumerate(board["panels"]):
        grid = panel["gridPos"]
        bottom = max(bottom, grid["y"] + grid["h"])
        box = f"left:{grid['x'] * CELL}px;top:{grid['y'] * UNIT}px;width:{grid['w'] * CELL - 8}px"
        found = answers.get(number, ())
        body = "" if panel["type"] == "row" else _body(panel, found, grid["h"] * UNIT - 34)
        heading = "h2" if panel["type"] == "row" else "h3"
        parts.append(
            f'<div class="{panel["type"]}" style="{box};height:{grid["h"] * UNIT - 8}px">'
            f"<{heading}>{html.escape(panel['title'])}</{heading}>{body}</div>"
        )
    return _PAGE.format(
        script=plotly.offline.get_plotlyjs(), height=bottom * UNIT, title=html.escape(board["title"]),
        body="".join(parts),
    )  # fmt: skip


def _body(panel: Mapping[str, Any], found: Sequence[tuple[str, Answer]], height: int) -> str:
    if not found:
        return "<p>no data in this run</p>"
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
    if panel["type"] in ("stat", "bargauge"):
        rows = [(name_of(legend, one.labels), _formatted(one.values[-1], unit)) for legend, one in found]
        return "".join(f"<p><b>{html.escape(value)}</b> {html.escape(name)}</p>" for name, value in rows[:MAX_ROWS])
    if panel["type"] == "table":
        return _table([one for _, one in found], unit)
    return str(_figure(panel["type"], found, unit, height).to_html(full_html=False, include_plotlyjs=False))


def _figure(kind: str, found: Sequence[tuple[str, Answer]], unit: str, height: int) -> Figure:
    if kind == "heatmap":
        figure = new_figure(height=height)
        last = [one.values[-1] for _, one in found]
        names = [name_of(legend, one.labels) for legend, one in found]
        figure.add_heatmap(
            x=_seconds(found[0][1]), y=names, z=[list(one.values) for _, one in found], zmax=max([*last, 1e-9]), zmin=0,
        )  # fmt: skip
        return figure
    lines = [Series(name=name_of(legend, one.labels), x=_seconds(one), y=np.array(one.values)) for legend, one in found]
    figure = draw(lines, x="s", y={"percentunit": "ratio"}.get(unit, unit), height=height)
    figure.update_layout(margin={"t": 30})
    return figure


def _seconds(one: Answer) -> Any:
    times = np.array(one.times)
    return times - times[0]


def _table(found: Sequence[Answer], unit: str) -> str:
    columns = [name for name in dict.fromkeys(name for one in found for name in one.labels) if name not in _HIDDEN]
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(one.labels.get(name, '')[:60])}</td>" for name in columns)
        + f"<td>{_formatted(one.values[-1], unit)}</td></tr>"
        for one in found[:MAX_ROWS]
    )  # fmt: skip
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in columns)}<th>value</th></tr>{rows}</table>"


def _formatted(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    return f"{value:,.4g}{f' {unit}' if unit not in ('', 'short', 'none') else ''}"


def picture(pages: Mapping[str, str], folder: Path) -> Iterator[Path]:
    """Write one PNG per page."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for name, text in pages.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": 900})
            page.set_content(text, timeout=120_000)
            path = folder / f"{name}.png"
            page.screenshot(path=path, full_page=True)
            page.close()
            yield path
        browser.close()


_PAGE = """<!doctype html><meta charset="utf-8"><script>{script}</script><style>
body {{ font: 13px system-ui, sans-serif; margin: 8px; width: 1440px; height: {height}px; position: relative }}
div.timeseries, div.stat, div.table, div.heatmap, div.state-timeline, div.bargauge, div.row
 {{ position: absolute; overflow: hidden; border: 1px solid #ccd }}
div.row {{ border: 0; background: #eef1f5 }} h2, h3 {{ margin: 4px 8px; font-size: 13px }} p {{ margin: 4px 8px }}
b {{ font-size: 18px }} table {{ margin: 4px 8px; border-collapse: collapse }} td, th {{ padding: 1px 6px }}
</style><title>{title}</title><body style="top:8px">{body}"""
