"""Run the queries of all Grafana panels on a real Prometheus that scrapes a recorded run.

    python -m benchmarks.scale.panels runs/latest
    python -m benchmarks.scale.panels runs/latest --pictures pictures      # one picture per dashboard, without Grafana

The run's last metrics are served as by `watch`. Prometheus (Debian's, see `tests/fetch_programs.sh`) scrapes them every
second and evaluates `grafana/prometheus/recording.yml`. A panel may have no data because its metrics are not recorded
in this run (a CPU run has no GPU), or because its condition (`> 0`) does not hold in a healthy run. If its query finds
nothing although the metrics exist, it is printed and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.scale import panel_pictures
from probes.tape.rundir import RunDir
from store import Store
from tests.programs import program
from watch.exporting.metrics.node_metrics import NodeMetrics
from watch.exporting.prometheus.server import Listen, Snapshot, serve

GRAFANA = Path(__file__).parents[2] / "grafana"
SCRAPED_S = 20
"""Seconds of scraping: rates and increases need two samples, recording rules one evaluation."""
_COMPARES = re.compile(r"(?:[<>]=?|[!=]=)(?:\s|bool)")
_MACROS = {"$__rate_interval": "15s", "$__interval": "5s", "$__range": "20s"}


def panels(run_id: str) -> Iterator[tuple[str, str, str]]:
    """(dashboard, panel title, query for this run)."""
    for name, board in boards().items():
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                yield name, panel["title"], query_of(target["expr"], run_id)


def boards() -> dict[str, Any]:
    """{name: dashboard in Grafana's JSON}."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def query_of(expression: str, run_id: str) -> str:
    """The expression with Grafana's variables filled in for this run."""
    query = expression.replace("$run_id", run_id).replace("$runs", ".*")
    for macro, value in _MACROS.items():
        query = query.replace(macro, value)
    return query


def pages(port: int, run_id: str, begin_s: float) -> dict[str, str]:
    """{name of a dashboard: HTML of its panels}."""
    found, end_s = {}, time.time()
    for name, board in boards().items():
        answers = {
            number: [
                (target.get("legendFormat", ""), one)
                for target in panel.get("targets", [])
                for one in panel_pictures.range_query(
                    port, query_of(target["expr"], run_id), begin_s=begin_s, end_s=end_s
                )
            ]
            for number, panel in enumerate(board["panels"])
        }
        found[name] = panel_pictures.board_page(board, answers)
    return found


def recording_rules() -> dict[str, str]:
    """{name: expression} of `recording.yml`."""
    text = (GRAFANA / "prometheus" / "recording.yml").read_text()
    found = re.findall(r"record: (\S+)\n\s+expr:((?:.|\n)*?)(?=\n\s*- |\n\n|\Z)", text)
    return {name: expression.removeprefix(" >-").strip() for name, expression in found}


def num_series(port: int, query: str) -> int:
    """Run an instant query; return the number of its series."""
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(url, timeout=60) as found:
        return len(json.load(found)["data"]["result"])


def ask(run: RunDir, folder: Path, pictures: Path | None = None) -> int:
    """Print one line per panel without data; return the number of panels that should have data."""
    manifest = run.manifest()
    with Store.open(run) as store:
        samples = NodeMetrics(manifest, node_rank=0).measure(store, time.time_ns())
    names, rules = {sample.name for sample in samples}, recording_rules()
    snapshot = Snapshot({"run_id": run.run_id, "node": "0"})
    snapshot.replace(samples)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serve(snapshot, Listen("127.0.0.1", 0)) as endpoint:
        config: dict[str, Any] = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(GRAFANA / "prometheus" / "recording.yml")],
            "scrape_configs": [
                {"job_name": "rankscope", "static_configs": [{"targets": [urllib.parse.urlsplit(endpoint.url).netloc]}]}
            ],
        }
        (folder / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
        server = subprocess.Popen(
            [program("prometheus"), f"--config.file={folder / 'prometheus.json'}", f"--storage.tsdb.path={folder}",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        )  # fmt: skip
        try:
            begin_s = time.time()
            time.sleep(SCRAPED_S)
            rows = [(*panel, num_series(port, panel[2])) for panel in panels(run.run_id)]
            drawn = pages(port, run.run_id, begin_s) if pictures else {}
        finally:
            server.terminate()
            server.wait(30)
    if pictures:
        for path in panel_pictures.picture(drawn, pictures):
            print(path)
    empty, unrecorded = [], 0
    for board, title, query, number in rows:
        for record, expression in rules.items():
            query = query.replace(record, f"({expression})")
        is_recorded = set(re.findall(r"\brankscope_\w+", query)) <= names
        if not number and is_recorded:
            empty.append((board, title, query))
        unrecorded += not number and not is_recorded
    print(
        f"{len(rows)} queries, {sum(row[3] > 0 for row in rows)} with data, {unrecorded} on metrics that this run lacks"
    )
    for board, title, query in empty:
        print(f"{'condition not met' if _COMPARES.search(query) else 'NO DATA'}  {board}: {title}  {query}")
    return sum(not _COMPARES.search(query) for *_, query in empty)


def main() -> int:
    """Run the benchmark. Returns 1 if a panel lacks data that it should have, 2 without Prometheus, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.panels", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="folder for a PNG of each dashboard")
    options = parser.parse_args()
    run = RunDir.open(options.run)
    if not program("prometheus"):
        sys.stderr.write("prometheus is not installed: sh tests/fetch_programs.sh .programs\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        return 1 if ask(run, Path(folder), options.pictures) else 0


if __name__ == "__main__":
    sys.exit(main())
