"""Debian's Prometheus and Alertmanager beside a run: a rank hangs, the alert fires, is delivered, and resolves."""

from __future__ import annotations

import functools
import json
import queue
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.e2e.launched import start, unhurried
from tests.ports import free_port
from tests.programs import needs, program
from tests.waiting import wait_for

GRAFANA = Path(__file__).resolve().parents[2] / "grafana"


@contextmanager
def webhook() -> Iterator[tuple[int, queue.Queue[dict[str, Any]]]]:
    """What Alertmanager delivers, message by message."""
    heard: queue.Queue[dict[str, Any]] = queue.Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server.server_port, heard
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=log.parent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def asked(port: int, query: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(url, timeout=100) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except OSError:
        return []  # it has not opened its port yet
    return found


def _every_panel_is_drawn(port: int, run_id: str) -> None:
    """Each query of each dashboard gets an answer from this run, but for what it cannot have."""
    silent = set()
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = (
                    target["expr"].replace("$run_id", run_id).replace("$runs", ".*").replace("$__rate_interval", "1m")
                )
                if not any(metric in query for metric in ("rankscope_bubble_", "rankscope_validation_loss")):
                    silent.add((path.stem, panel["title"], query))  # it has no pipeline, and does not evaluate
    cannot_have = {
        *(("health", title) for title in _of_gpus()),  # there is no GPU
        ("ranks", "Stragglers"), ("run", "Open findings of the run"), ("run", "Number of open findings"),
        ("fleet", "Open findings of all runs"), ("fleet", "Number of open findings"),  # the hang is over
        ("ranks", "Ranks that are down"), ("run", "Time since the last rollback"),  # there was none
        ("run", "Failures of watch in ten minutes"),
        ("run", "Load of experts (100 %: even)"),  # the model has none
        ("run", "Dropped tokens (expert capacity)"),
        ("run", "Logged by the script"),  # the trainer logs no names of its own
        *(("health", f"InfiniBand {what} in ten minutes") for what in ("errors", "congestion", "links lost")),
        ("health", "Throttled by the CPU limit in ten minutes"),  # a group without a limit counts nothing
    }  # fmt: skip

    def empty() -> set[tuple[str, str]]:
        silent.difference_update([one for one in silent if asked(port, one[2])])
        return {(dashboard, title) for dashboard, title, _ in silent}

    titles = {(path.stem, panel["title"]) for path in (GRAFANA / "dashboards").glob("*.json")
              for panel in json.loads(path.read_text())["panels"]}  # fmt: skip
    assert cannot_have <= titles
    try:  # one scrape of more than a second and nothing has an answer until the next
        wait_for(lambda: empty() <= cannot_have, "an answer to each query", deadline_s=60.0)
    except AssertionError:
        raise AssertionError(f"no answer in 60 s: {empty() - cannot_have}") from None


def _of_gpus() -> list[str]:
    panels = json.loads((GRAFANA / "dashboards" / "health.json").read_text())["panels"]
    return [panel["title"] for panel in panels if "rankscope_gpu_" in json.dumps(panel)]


@needs("prometheus", "prometheus-alertmanager")
def test_a_hang_is_alerted_delivered_and_resolved(tmp_path: Path) -> None:
    """With the files of `grafana/`, only quicker: evaluated each second, and resolved after 3 s instead of 30."""
    metrics_port, alerts_port = free_port(), free_port()
    shutil.copytree(GRAFANA, tmp_path / "grafana")
    rules = tmp_path / "grafana" / "prometheus" / "alerts.yml"
    rules.write_text(rules.read_text().replace("keep_firing_for: 30s", "keep_firing_for: 3s"))
    config = rules.with_name("prometheus.yml")
    text = config.read_text().replace("evaluation_interval: 5s", "evaluation_interval: 1s")
    # Scraped as often as by default: on a busy machine an answer may take longer than a second, and would be lost.
    text = text.replace("127.0.0.1:9093", f"127.0.0.1:{alerts_port}")
    config.write_text(text)
    with webhook() as (hook_port, heard):
        manager = tmp_path / "grafana" / "alertmanager" / "alertmanager.yml"
        text = manager.read_text().replace("127.0.0.1:9094", f"127.0.0.1:{hook_port}")
        manager.write_text(text.replace("group_interval: 1m", "group_interval: 1s"))
        prometheus = [
            program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{metrics_port}",
        ]
        alertmanager = [
            program("prometheus-alertmanager"),
            f"--config.file={manager}",
            f"--storage.path={tmp_path / 'am'}",
            f"--web.listen-address=127.0.0.1:{alerts_port}",
            "--cluster.listen-address=",
        ]
        with started(prometheus, tmp_path / "prometheus.log"), started(alertmanager, tmp_path / "alertmanager.log"):
            # Where other tests hold both cores for some seconds, a healthy rank must not count as hanging, too.
            settings = ["train.steps=100000", "recovery.hang_floor_s=10"]
            faults = ["hang@step=40,rank=1", *unhurried(2)]
            run = start(tmp_path, "two", faults=faults, settings=settings)
            wait_for(lambda: asked(metrics_port, "rankscope_step > 5"), "a step in Prometheus", run)
            seen: dict[str, set[str]] = {}

            def hears(name: str, status: str) -> bool:
                while not heard.empty():
                    for alert in heard.get()["alerts"]:
                        seen.setdefault(alert["labels"]["alertname"], set()).add(alert["status"])
                return status in seen.get(name, set())

            wait_for(lambda: hears("RankscopeStalled", "firing"), "the alert", run)
            wait_for(lambda: asked(metrics_port, "rankscope_step > 45"), "steps after the restart", run)
            wait_for(lambda: hears("RankscopeStalled", "resolved"), "the end of the alert", run)
            for query in ('rankscope_findings_total{kind="hang"}', "rankscope_restarts_total"):
                answer = wait_for(functools.partial(asked, metrics_port, query), f"an answer to {query}", run)
                assert answer[0]["value"][1] == "1", query
            _every_panel_is_drawn(metrics_port, run.run.run_id)
            run.process.terminate()
            run.finish(exit_code=143)
            ended = 'max_over_time(rankscope_run_state{state="preempted"}[1h]) == 1'  # its target is gone by now
            wait_for(lambda: asked(metrics_port, ended), "how the run ended")
            # While it is scraped: a watch waits a minute for the scrape that shows its end.
            targets = tmp_path / "runs" / "targets.json"
            wait_for(lambda: json.loads(targets.read_text()) == [], "the target to be taken away")
