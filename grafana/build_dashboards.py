"""Write the Grafana dashboards in `grafana/dashboards/` from the tables of panels in `grafana/pages/`.

    python grafana/build_dashboards.py           # after a change in grafana/pages or in the metrics catalogue

A page is a TOML file with a list of rows, and a row is a list of panels. A panel takes one line, with a `title` and
either a `query` or `queries` ({legend = PromQL}). `$run` in a query is replaced with the filter for the selected runs.
`limits` are pairs (lower bound, colour); `most` is the upper end of the axis.

Defaults: `kind` is timeseries; `unit` and `help` come from the query's first metric; `legend` shows the labels in the
query's `by` clause, or else the title; `width` (of 24 columns) and `height` depend on `kind`.

The JSON is classic dashboard JSON, which Grafana 10 to 13 import. Each panel gets its data source from the variable
`datasource`. All times come from the run's records. Annotations show the alerts that fired.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from watch.exporting.metrics.catalogue import METRICS, Metric  # noqa: E402

FOLDER = ROOT / "grafana" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
DASHBOARD = "http://127.0.0.1:8501"
"""Default address of `rankscope dashboard`; users can change it in a variable of each page."""
ONE_RUN, ALL_RUNS = 'run_id="$run_id"', 'run_id=~"$runs"'
UNITS = {
    "seconds": "s", "bytes": "bytes", "ratio": "percentunit", "celsius": "celsius", "watts": "watt", "hertz": "hertz",
    "joules": "joule",
}  # fmt: skip
# The palette of the reports. People with colour vision deficiency can tell its colours apart.
COLORS = {"ok": "#009E73", "warning": "#E69F00", "critical": "#D55E00"}
_SIZES = {"stat": (4, 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. The fields are the keys of its line in the page's TOML file."""

    title: str
    query: str = ""
    queries: Mapping[str, str] = field(default_factory=dict)
    legend: str | None = None
    kind: Literal["timeseries", "stat", "table", "state-timeline", "bargauge", "heatmap"] = "timeseries"
    width: int = 0
    height: int = 0
    unit: str = ""
    help: str = ""
    stacked: bool = False
    limits: Sequence[tuple[float, str]] = ()
    most: float | None = None
    link: str = ""
    """Path, below the dashboard's address, to which a table row links; `<label>` is replaced with the row's label."""
    order: Sequence[str] = ()
    """Columns of a table, from left to right."""

    @property
    def size(self) -> tuple[int, int]:
        """Width (of 24 columns) and height."""
        width, height = _SIZES.get(self.kind, (12, 8))
        return self.width or width, self.height or height

    @property
    def metric(self) -> Metric | None:
        """The first metric of the queries; None if they use recording rules only."""
        names = re.findall(r"(?<![:\w])rankscope_\w+", " ".join([self.query, *self.queries.values()]))
        return METRICS[names[0]] if names else None

    def legends(self) -> Mapping[str, str]:
        """{legend: PromQL}."""
        if self.queries:
            return self.queries
        labels = re.search(r"\bby \(([^)]+)\)", self.query)
        legend = " ".join(f"{{{{{label.strip()}}}}}" for label in labels[1].split(",")) if labels else ""
        if self.kind in ("stat", "table"):
            legend = ""
        elif not legend:
            legend = self.title.lower()
        return {legend if self.legend is None else self.legend: self.query}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One dashboard: rows of panels under headings."""

    uid: str
    title: str
    help: str
    row: Sequence[Mapping[str, Any]]
    one_run: bool = True

    @property
    def run(self) -> str:
        """PromQL label matcher that selects the runs in a query."""
        return ONE_RUN if self.one_run else ALL_RUNS


PAGES = tuple(
    Page(**tomllib.loads((ROOT / "grafana" / "pages" / f"{name}.toml").read_text(encoding="utf-8")))
    for name in ("fleet", "run", "ranks", "health", "goodput")
)


def dashboard(page: Page) -> dict[str, Any]:
    """The page as Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in page.row:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row["title"],
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            }
        )
        top += 1
        left = tallest = 0
        for panel in (Panel(**given) for given in row["panels"]):
            width, height = panel.size
            if left + width > 24:
                top, left, tallest = top + tallest, 0, 0
            panels.append(_panel(page, panel, len(panels) + 1, left, top))
            left, tallest = left + width, max(tallest, height)
        top += tallest
    return {
        "uid": page.uid,
        "id": None,
        "title": page.title,
        "description": page.help,
        "tags": ["rankscope"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables(page)},
        "annotations": {"list": [_alerts(page)]},
        "links": _links(page),
        "panels": panels,
    }


def _panel(page: Page, panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    is_table = panel.kind == "table"
    width, height = panel.size
    metric = panel.metric
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help or (metric.help if metric else ""),
        "datasource": SOURCE,
        "gridPos": {"x": left, "y": top, "w": width, "h": height},
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(65 + i),
                "datasource": SOURCE,
                "expr": query.replace("$run}", f"{page.run}}}").replace("$run,", f"{page.run},"),
                "legendFormat": legend or "__auto",
                "instant": is_table or panel.kind in ("stat", "bargauge"),
                "range": not is_table,
                "format": "table" if is_table else "time_series",
            }
            for i, (legend, query) in enumerate(panel.legends().items())
        ],
        "transformations": [{"id": "organize", "options": _columns(panel)}] if is_table else [],
    }


def _columns(panel: Panel) -> dict[str, Any]:
    found: dict[str, Any] = {"excludeByName": {"Time": True, "Value": True}}
    if panel.order:
        found["indexByName"] = {name: place for place, name in enumerate(panel.order)}
    return found


def _defaults(panel: Panel) -> dict[str, Any]:
    metric = panel.metric
    steps = [{"color": COLORS[name], "value": value if i else None} for i, (value, name) in enumerate(panel.limits)]
    found: dict[str, Any] = {
        "unit": panel.unit or UNITS.get(metric.unit if metric else "", "short"),
        "min": 0 if panel.most is not None else None,
        "max": panel.most,
        "custom": {},
        "mappings": [],
        "thresholds": {"mode": "absolute", "steps": steps or [{"color": COLORS["ok"], "value": None}]},
    }
    if panel.link:
        address = re.sub(r"<(\w+)>", r"${__data.fields.\1}", panel.link)
        found["links"] = [{"title": "Open in Rankscope", "url": f"${{dashboard}}{address}", "targetBlank": True}]
    if panel.kind == "timeseries":
        found["color"] = {"mode": "palette-classic"}
        found["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
    return found


def _options(panel: Panel) -> dict[str, Any]:
    legend = {"displayMode": "list", "placement": "bottom"}
    last = {"calcs": ["lastNotNull"]}
    found: dict[str, dict[str, Any]] = {
        "timeseries": {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}},
        "stat": {"reduceOptions": last, "graphMode": "none", "colorMode": "value" if panel.limits else "none"},
        "bargauge": {"reduceOptions": last, "orientation": "horizontal", "displayMode": "basic"},
        "state-timeline": {"mergeValues": True, "showValue": "never", "legend": legend},
        "table": {},
        "heatmap": {
            "calculate": False,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "yAxis": {"axisPlacement": "left"},
            "legend": {"show": True},
        },
    }
    return found[panel.kind]


def _variables(page: Page) -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    ours: dict[str, Any] = {
        "name": "dashboard",
        "label": "rankscope dashboard",
        "type": "textbox",
        "query": DASHBOARD,
        "hide": 0,
    }
    ours["current"] = {"text": DASHBOARD, "value": DASHBOARD}
    query = {
        "type": "query",
        "datasource": SOURCE,
        "refresh": 2,
        "sort": 2,
        "hide": 0,
        "query": {"query": "label_values(rankscope_run_info, run_id)", "refId": "runs"},
        "definition": "label_values(rankscope_run_info, run_id)",
    }
    if page.one_run:
        return [source, query | {"name": "run_id", "label": "Run", "multi": False, "includeAll": False}, ours]
    many = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return [source, query | {"name": "runs", "label": "Runs", **many}, ours]


def _alerts(page: Page) -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": COLORS["critical"],
        "useValueForTime": False,
        "expr": f'ALERTS{{alertstate="firing", alertname=~"Rankscope.*", {page.run}}}',
        "step": "10s",
        "titleFormat": "{{alertname}}",
        "textFormat": "{{run_id}} rank {{rank}} {{cause}}",
    }


def _links(page: Page) -> list[dict[str, Any]]:
    others = [
        {
            "title": other.title.removeprefix("Rankscope: "),
            "type": "link",
            "url": f"/d/{other.uid}",
            "keepTime": True,
            "includeVars": True,
        }
        for other in PAGES
        if other is not page
    ]
    address = "${dashboard}/findings?run=${run_id}" if page.one_run else "${dashboard}/"
    ours = {"title": "findings and what to do", "type": "link", "url": address, "targetBlank": True}
    return [*others, ours]


def rendered(page: Page) -> str:
    """The page as the text of its JSON file."""
    return json.dumps(dashboard(page), indent=1) + "\n"


def file_of(page: Page) -> Path:
    """Path of the page's JSON file."""
    return FOLDER / f"{re.sub('^rankscope-', '', page.uid)}.json"


if __name__ == "__main__":
    for page in PAGES:
        file_of(page).write_text(rendered(page), encoding="utf-8")
