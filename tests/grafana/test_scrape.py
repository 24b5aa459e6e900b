"""The example for Prometheus, in a real one: whose metrics they are, and which node of which run does not answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.programs import needs, program
from tests.waiting import wait_for
from watch.exporting.metrics.catalogue import Sample
from watch.exporting.prometheus.endpoint import announced
from watch.exporting.prometheus.server import Listen, Snapshot, serve

GRAFANA = Path(__file__).resolve().parents[2] / "grafana"


def answer(port: int, query: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(url, timeout=100) as found:
            return [sample["metric"] for sample in json.load(found)["data"]["result"]]
    except OSError:
        return []  # it has not opened its port yet


def wait_for_answer(port: int, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = wait_for(lambda: answer(port, query), query, deadline_s=90)
    return found


@needs("prometheus")
def test_run_and_node_are_those_of_the_metrics_and_of_up(tmp_path: Path) -> None:
    shutil.copytree(GRAFANA / "prometheus", tmp_path / "grafana" / "prometheus")
    config = tmp_path / "grafana" / "prometheus" / "prometheus.yml"
    config.write_text(config.read_text().replace("5s", "1s"))
    (tmp_path / "runs").mkdir()
    port = free_port()
    process = subprocess.Popen(
        [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    snapshot = Snapshot({"run_id": "demo", "node": "1"})
    snapshot.replace([Sample("rankscope_step", 40)])
    try:
        with serve(snapshot, Listen()) as endpoint:
            entry = announced(tmp_path / "runs", "demo", 1, endpoint.address)
            entry.__enter__()
            (labels,) = wait_for_answer(port, "rankscope_step == 40")
            assert {name: labels.get(name) for name in ("run_id", "node", "exported_run_id")} == {
                "run_id": "demo", "node": "1", "exported_run_id": None}  # fmt: skip
        (down,) = wait_for_answer(port, 'up{job="rankscope"} == 0')  # its machine is gone, the entry is there
        assert (down["run_id"], down["node"]) == ("demo", "1")
        entry.__exit__(None, None, None)
    finally:
        process.kill()
        process.wait()
