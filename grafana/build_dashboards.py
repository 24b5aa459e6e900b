"""Writes the Grafana dashboards in `grafana/dashboards/` from the descriptions below.

    python grafana/build_dashboards.py           # after a change here or in the catalogue of metrics

Classic dashboard JSON, which Grafana 10 to 13 import. Each panel names its data source by the variable `datasource`,
has a title, a description (the metric's own help where none is given) and a unit. All times are those of the run's own
records; annotations are the alerts that fired.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from probes.exporters.catalogue import METRICS  # noqa: E402

FOLDER = ROOT / "grafana" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ONE_RUN = 'run_id="$run_id"'
_UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "percentunit",
    "celsius": "celsius",
    "watts": "watt",
    "hertz": "hertz",
}
# The palette of the reports: told apart by people with any colour vision.
OK, WARNING, CRITICAL = "#009E73", "#E69F00", "#D55E00"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `queries` are (PromQL, legend); `width` is of 24 columns; `limits` colour a number from there on."""

    title: str
    queries: Sequence[tuple[str, str]]
    kind: Literal["timeseries", "stat", "table", "state-timeline", "bargauge"] = "timeseries"
    width: int = 12
    height: int = 8
    unit: str = ""
    help: str = ""
    stacked: bool = False
    limits: Sequence[tuple[float, str]] = ()
    most: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One dashboard: rows of panels under headings."""

    uid: str
    title: str
    help: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    one_run: bool = True


def metric(name: str, by: str = "", *, how: str = "max", where: str = ONE_RUN) -> str:
    """PromQL of one metric of the catalogue, over the nodes."""
    METRICS[f"rankscope_{name}"]
    grouped = f" by ({by})" if by else ""
    return f"{how}{grouped} (rankscope_{name}{{{where}}})"


def line(name: str, by: str = "", *, title: str = "", legend: str = "", how: str = "max", **more: Any) -> Panel:
    """A time series of one metric, with its own help and unit."""
    described = METRICS[f"rankscope_{name}"]
    return Panel(
        title=title or name.replace("_", " "),
        queries=[(metric(name, by, how=how), legend or (f"{{{{{by}}}}}" if by else name))],
        unit=_UNITS.get(described.unit, "short"),
        help=described.help,
        **more,
    )


def number(title: str, query: str, unit: str = "short", help: str = "", **more: Any) -> Panel:
    """A single number."""
    return Panel(title=title, queries=[(query, "")], kind="stat", unit=unit, help=help, width=4, height=4, **more)


STATES = (
    ("training", OK),
    ("starting", "#56B4E9"),
    ("recovering", WARNING),
    ("stalled", CRITICAL),
    ("finished", "#999999"),
    ("preempted", "#999999"),
    ("interrupted", "#999999"),
    ("fenced", "#999999"),
    ("failed", CRITICAL),
    ("given up", CRITICAL),
    ("died", CRITICAL),
    ("empty", "#999999"),
)

FLEET = Page(
    uid="rankscope-fleet",
    title="Rankscope: all runs",
    help="Which runs there are, which are in trouble, and how well the time is used.",
    one_run=False,
    rows=[
        (
            "Now",
            [
                Panel(
                    title="State",
                    kind="state-timeline",
                    width=24,
                    height=8,
                    queries=[
                        ('max by (run_id, state) (rankscope_run_state{run_id=~"$runs"}) == 1', "{{run_id}} {{state}}")
                    ],
                    help=METRICS["rankscope_run_state"].help,
                ),
                Panel(
                    title="Runs",
                    kind="table",
                    width=24,
                    queries=[
                        ('max by (run_id, name, mesh, device, version) (rankscope_run_info{run_id=~"$runs"})', ""),
                    ],
                    help="What each run is.",
                ),
                Panel(
                    title="Open findings",
                    unit="short",
                    queries=[
                        (
                            'sum by (run_id, kind, severity) (rankscope_findings{run_id=~"$runs"})',
                            "{{run_id}} {{kind}} {{severity}}",
                        ),
                    ],
                    help=METRICS["rankscope_findings"].help,
                ),
                Panel(
                    title="Seconds since the last step",
                    unit="s",
                    queries=[
                        ("run:rankscope_silence_seconds:max", "{{run_id}}"),
                    ],
                    help="Older than a few steps: look at the state.",
                ),
            ],
        ),
        (
            "Use of the time",
            [
                Panel(
                    title="Tokens a second",
                    unit="short",
                    queries=[("run:rankscope_tokens_per_second:sum", "{{run_id}}")],
                    help="Over all nodes of a run.",
                ),
                Panel(
                    title="Goodput",
                    unit="percentunit",
                    most=1,
                    queries=[("run:rankscope_goodput_ratio:avg", "{{run_id}}")],
                    help=METRICS["rankscope_goodput_ratio"].help,
                ),
                Panel(
                    title="Step",
                    unit="short",
                    queries=[("run:rankscope_step:min", "{{run_id}}")],
                    help=METRICS["rankscope_step"].help,
                ),
                Panel(
                    title="Ranks down",
                    unit="short",
                    queries=[("run:rankscope_ranks_down:count", "{{run_id}}")],
                    help="Ranks that have died and are not back.",
                ),
            ],
        ),
    ],
)

RUN = Page(
    uid="rankscope-run",
    title="Rankscope: one run",
    help="Is it learning, at what speed, and what was done to keep it going.",
    rows=[
        (
            "Now",
            [
                number("Step", metric("step", how="min"), help=METRICS["rankscope_step"].help),
                number("Ranks", metric("world_size"), help=METRICS["rankscope_world_size"].help),
                number(
                    "Attempt", metric("attempt"), help=METRICS["rankscope_attempt"].help, limits=[(0, OK), (1, WARNING)]
                ),
                number(
                    "Goodput",
                    metric("goodput_ratio", how="avg"),
                    "percentunit",
                    METRICS["rankscope_goodput_ratio"].help,
                    limits=[(0, CRITICAL), (0.5, WARNING), (0.8, OK)],
                ),
                number(
                    "Since the last step",
                    f"time() - {metric('last_step_timestamp_seconds')}",
                    "s",
                    "Against the limit from which the run counts as stalled.",
                ),
                number("Limit", metric("stall_limit_seconds"), "s", METRICS["rankscope_stall_limit_seconds"].help),
                Panel(
                    title="State",
                    kind="state-timeline",
                    width=24,
                    height=4,
                    queries=[(f"{metric('run_state', 'state')} == 1", "{{state}}")],
                    help=METRICS["rankscope_run_state"].help,
                ),
            ],
        ),
        (
            "Learning",
            [
                line("loss", title="Loss"),
                line("grad_norm", title="Gradient norm"),
                line("learning_rate", title="Learning rate"),
                line("tokens_total", title="Tokens", how="sum"),
            ],
        ),
        (
            "Speed",
            [
                line("step_duration_seconds", "stat", title="Step time"),
                Panel(
                    title="Tokens a second",
                    unit="short",
                    help=METRICS["rankscope_tokens_per_second"].help,
                    queries=[(metric("tokens_per_second", how="sum"), "tokens/s")],
                ),
                Panel(
                    title="Where a step goes",
                    unit="percentunit",
                    help="Shares of the newest steps.",
                    queries=[
                        (metric("exposed_communication_ratio"), "exposed communication"),
                        (metric("data_wait_ratio"), "waiting for data"),
                        (metric("bubble_ratio"), "pipeline bubble (whole run)"),
                    ],
                ),
                line("steps_total", title="Steps that counted"),
            ],
        ),
        (
            "Findings and recovery",
            [
                Panel(
                    title="Open findings",
                    unit="short",
                    help=METRICS["rankscope_findings"].help,
                    queries=[(metric("findings", "kind, severity", how="sum"), "{{kind}} {{severity}}")],
                ),
                Panel(
                    title="Findings since the begin",
                    unit="short",
                    help=METRICS["rankscope_findings_total"].help,
                    queries=[(metric("findings_total", "kind", how="sum"), "{{kind}}")],
                ),
                Panel(
                    title="Seconds since a finding",
                    unit="s",
                    help=METRICS["rankscope_last_finding_timestamp_seconds"].help,
                    queries=[(f"time() - {metric('last_finding_timestamp_seconds', 'kind')}", "{{kind}}")],
                ),
                Panel(
                    title="What was done",
                    unit="short",
                    help="Counted since the run began.",
                    queries=[
                        (metric("rollbacks_total"), "rollbacks"),
                        (metric("restarts_total"), "restarts"),
                        (metric("batches_skipped_total"), "batches given up"),
                        (metric("rank_deaths_total", how="sum"), "deaths"),
                        (metric("steps_discarded_total"), "steps for nothing"),
                    ],
                ),
                Panel(
                    title="Last rollback",
                    unit="s",
                    help=METRICS["rankscope_last_rollback_timestamp_seconds"].help,
                    queries=[(f"time() - {metric('last_rollback_timestamp_seconds')}", "ago")],
                ),
            ],
        ),
        (
            "Checkpoints",
            [
                line("checkpoint_step", "tier", title="Newest checkpoint"),
                Panel(
                    title="Age",
                    unit="s",
                    help="Of the newest complete one of a tier, and of the newest good one.",
                    queries=[
                        (f"time() - {metric('checkpoint_timestamp_seconds', 'tier')}", "{{tier}}"),
                        ('run:rankscope_checkpoint_age_seconds:min{run_id="$run_id"}', "good"),
                    ],
                ),
                line("checkpoint_stall_seconds", "tier", title="Stall"),
                line("checkpoint_bytes", "tier", title="Size"),
                line("checkpoint_failures_total", title="Failed saves"),
                line("checkpoint_interval_steps", title="Interval"),
            ],
        ),
        (
            "Telemetry",
            [
                line("telemetry_tick_seconds", "node", title="A tick of watch"),
                Panel(
                    title="Rows a second",
                    unit="short",
                    help=METRICS["rankscope_telemetry_rows_total"].help,
                    queries=[
                        (
                            'sum by (node) (rate(rankscope_telemetry_rows_total{run_id="$run_id"}[$__rate_interval]))',
                            "{{node}}",
                        )
                    ],
                ),
                Panel(
                    title="Seconds since the last tick",
                    unit="s",
                    help=METRICS["rankscope_telemetry_last_tick_timestamp_seconds"].help,
                    queries=[(f"time() - {metric('telemetry_last_tick_timestamp_seconds', 'node')}", "{{node}}")],
                ),
                Panel(
                    title="Failures",
                    unit="short",
                    help="Of ticks, and of single analyzers.",
                    queries=[
                        (metric("telemetry_failed_ticks_total", "node"), "ticks, node {{node}}"),
                        (metric("telemetry_analyzer_errors_total", "analyzer"), "{{analyzer}}"),
                    ],
                ),
            ],
        ),
    ],
)

RANKS = Page(
    uid="rankscope-ranks",
    title="Rankscope: ranks",
    help="Who is slow, who is behind, who is dead.",
    rows=[
        (
            "Ranks",
            [
                Panel(
                    title="Own work against the median rank",
                    unit="percentunit",
                    width=24,
                    help="All ranks of a step take equally long; the slow one is whose own work is larger.",
                    queries=[
                        (
                            f"topk(8, {metric('rank_own_seconds', 'rank')} / on () group_left () "
                            f"quantile(0.5, {metric('rank_own_seconds', 'rank')}) - 1)",
                            "rank {{rank}}",
                        )
                    ],
                ),
                line("straggler_excess_ratio", "rank, cause", title="Stragglers", legend="rank {{rank}} {{cause}}"),
                Panel(
                    title="Alive",
                    kind="state-timeline",
                    help=METRICS["rankscope_rank_up"].help,
                    queries=[(metric("rank_up", "rank", how="min"), "rank {{rank}}")],
                ),
                line("rank_step_duration_seconds", "rank", title="Step time"),
                line("rank_own_seconds", "rank", title="Own work"),
                line("rank_memory_bytes", "rank", title="Memory"),
                line("rank_step", "rank", title="Step"),
                Panel(
                    title="Seconds since the last step",
                    unit="s",
                    help=METRICS["rankscope_rank_last_record_timestamp_seconds"].help,
                    queries=[(f"time() - {metric('rank_last_record_timestamp_seconds', 'rank')}", "rank {{rank}}")],
                ),
                Panel(
                    title="Where they are",
                    kind="table",
                    help=METRICS["rankscope_rank_info"].help,
                    queries=[(metric("rank_info", "rank, local_rank, host, gpu_uuid, node"), "")],
                ),
            ],
        ),
    ],
)

HEALTH = Page(
    uid="rankscope-health",
    title="Rankscope: devices and hosts",
    help="What the hardware under a run does.",
    rows=[
        (
            "Errors",
            [
                line("gpu_xid_total", "device, xid, class", title="XID errors", legend="{{device}} {{xid}} {{class}}"),
                Panel(
                    title="Seconds since an XID",
                    unit="s",
                    help=METRICS["rankscope_gpu_last_xid_timestamp_seconds"].help,
                    queries=[
                        (f"time() - {metric('gpu_last_xid_timestamp_seconds', 'device, xid')}", "{{device}} {{xid}}")
                    ],
                ),
                line("gpu_ecc_corrected_total", "device", title="Corrected memory errors"),
                line("gpu_ecc_uncorrected_total", "device", title="Uncorrected memory errors"),
                line("gpu_remapped_rows_total", "device", title="Remapped rows"),
                Panel(
                    title="Remapping",
                    unit="short",
                    help="Waits for a reset, or has failed.",
                    queries=[
                        (metric("gpu_remap_pending", "device"), "{{device}} pending"),
                        (metric("gpu_remap_failed", "device"), "{{device}} failed"),
                    ],
                ),
                line("gpu_nvlink_errors_total", "device", title="NVLink errors"),
                line("gpu_pcie_replays_total", "device", title="PCIe replays"),
            ],
        ),
        (
            "Devices",
            [
                line("gpu_throttled", "device, reason", title="Slowed down", legend="{{device}} {{reason}}"),
                *(
                    line(name, "device", title=title)
                    for name, title in (
                        ("gpu_sm_clock_hertz", "Clock"),
                        ("gpu_temperature_celsius", "Temperature"),
                        ("gpu_power_watts", "Power"),
                        ("gpu_energy_joules_total", "Energy"),
                        ("gpu_utilization_ratio", "Busy"),
                        ("gpu_sm_active_ratio", "Multiprocessors with work"),
                        ("gpu_tensor_active_ratio", "Tensor cores at work"),
                        ("gpu_memory_bandwidth_ratio", "Memory bandwidth"),
                        ("gpu_memory_used_bytes", "Memory in use"),
                        ("gpu_memory_total_bytes", "Memory"),
                    )
                ),
            ],
        ),
        (
            "Hosts",
            [
                line(name, "node", title=title)
                for name, title in (
                    ("host_cpu_utilization_ratio", "CPU"),
                    ("host_load", "Load"),
                    ("host_memory_used_bytes", "Memory of the host in use"),
                    ("host_memory_total_bytes", "Memory of the host"),
                    ("host_swapped_pages_total", "Pages swapped"),
                    ("host_network_errors_total", "Network errors"),
                    ("disk_free_bytes", "Free space for the run"),
                )
            ],
        ),
    ],
)

GOODPUT = Page(
    uid="rankscope-goodput",
    title="Rankscope: goodput",
    help="Where every second of a run went.",
    rows=[
        (
            "Goodput",
            [
                number(
                    "Goodput",
                    metric("goodput_ratio", how="avg"),
                    "percentunit",
                    METRICS["rankscope_goodput_ratio"].help,
                    limits=[(0, CRITICAL), (0.5, WARNING), (0.8, OK)],
                ),
                number(
                    "Run for",
                    f"time() - {metric('run_start_timestamp_seconds', how='min')}",
                    "s",
                    METRICS["rankscope_run_start_timestamp_seconds"].help,
                ),
                Panel(
                    title="Where the time went",
                    kind="bargauge",
                    unit="s",
                    width=16,
                    height=10,
                    help=METRICS["rankscope_time_seconds"].help,
                    queries=[(f"sort_desc({metric('time_seconds', 'category', how='avg')})", "{{category}}")],
                ),
                Panel(
                    title="Over the run",
                    unit="s",
                    width=24,
                    stacked=True,
                    help=METRICS["rankscope_time_seconds"].help,
                    queries=[(metric("time_seconds", "category", how="avg"), "{{category}}")],
                ),
                line("goodput_ratio", title="Goodput over the run", how="avg", width=24, most=1),
            ],
        ),
    ],
)

PAGES = (FLEET, RUN, RANKS, HEALTH, GOODPUT)


def dashboard(page: Page) -> dict[str, Any]:
    """The page as Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, row in page.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": heading,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            }
        )
        top += 1
        left = tallest = 0
        for panel in row:
            if left + panel.width > 24:
                top, left, tallest = top + tallest, 0, 0
            panels.append(_panel(panel, len(panels) + 1, left, top))
            left, tallest = left + panel.width, max(tallest, panel.height)
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


def _panel(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    steps = [{"color": color, "value": None if i == 0 else value} for i, (value, color) in enumerate(panel.limits)]
    defaults: dict[str, Any] = {
        "unit": panel.unit or "short",
        "min": 0 if panel.most is not None else None,
        "max": panel.most,
        "custom": {},
        "mappings": [],
        "thresholds": {"mode": "absolute", "steps": steps or [{"color": OK, "value": None}]},
    }
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        defaults["color"] = {"mode": "palette-classic"}
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind == "stat":
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "graphMode": "none",
            "colorMode": "value" if steps else "none",
        }
    elif panel.kind == "bargauge":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "orientation": "horizontal", "displayMode": "basic"}
    elif panel.kind == "state-timeline":
        options = {"mergeValues": True, "showValue": "never", "legend": {"displayMode": "list", "placement": "bottom"}}
    is_table = panel.kind == "table"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": {"x": left, "y": top, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(65 + i),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend or "__auto",
                "instant": is_table or panel.kind in ("stat", "bargauge"),
                "range": not is_table,
                "format": "table" if is_table else "time_series",
            }
            for i, (query, legend) in enumerate(panel.queries)
        ],
        "transformations": [{"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True}}}]
        if is_table
        else [],
    }


def _variables(page: Page) -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
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
        return [source, query | {"name": "run_id", "label": "Run", "multi": False, "includeAll": False}]
    return [
        source,
        query
        | {
            "name": "runs",
            "label": "Runs",
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _alerts(page: Page) -> dict[str, Any]:
    which = ', run_id="$run_id"' if page.one_run else ', run_id=~"$runs"'
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": CRITICAL,
        "useValueForTime": False,
        "expr": f'ALERTS{{alertstate="firing", alertname=~"Rankscope.*"{which}}}',
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
    runbook = {"title": "runbook", "type": "link", "url": "docs/runbook.md", "targetBlank": True}
    return [*others, runbook]


def rendered(page: Page) -> str:
    """The file's text."""
    return json.dumps(dashboard(page), indent=1) + "\n"


def file_of(page: Page) -> Path:
    """Where the page is kept."""
    return FOLDER / f"{re.sub('^rankscope-', '', page.uid)}.json"


if __name__ == "__main__":
    for page in PAGES:
        file_of(page).write_text(rendered(page), encoding="utf-8")
