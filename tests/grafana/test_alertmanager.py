"""The example for Alertmanager, in a real one: who is told of what, and what a dead node silences."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.programs import needs, program
from tests.waiting import wait_for

CONFIG = Path(__file__).resolve().parents[2] / "grafana" / "alertmanager" / "alertmanager.yml"


def asked(port: int, path: str, posted: Any = None) -> Any:
    data = None if posted is None else json.dumps(posted).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/v2/{path}", data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=100) as answer:
        text = answer.read()
    return json.loads(text) if text else None


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of an Alertmanager with the example's file."""
    number = free_port()
    folder = tmp_path_factory.mktemp("alertmanager")
    process = subprocess.Popen(
        [program("prometheus-alertmanager"), f"--config.file={CONFIG}", f"--storage.path={folder}",
         f"--web.listen-address=127.0.0.1:{number}", "--cluster.listen-address="],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: answers(number), "Alertmanager's status")
        let_the_inhibitor_catch_up(number, after="the start")  # what it finds at its start comes in no order
        yield number
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    try:
        asked(port, "status")
    except OSError:  # it has not opened its port yet
        return False
    return True


def silenced(port: int, alerts: list[dict[str, str]]) -> set[tuple[str, str]]:
    """(alert, rank) of those that nobody is told of."""
    run = alerts[0]["run_id"]
    post(port, alerts)
    let_the_inhibitor_catch_up(port, after=run)
    found = alerts_of(port, run)
    assert len(found) == len(alerts)
    return {
        (alert["labels"]["alertname"], alert["labels"].get("rank", ""))
        for alert in found
        if alert["status"]["inhibitedBy"]
    }


def let_the_inhibitor_catch_up(port: int, after: str) -> None:
    """Wait until it has taken up all that was posted before.

    It hears of alerts in a goroutine of its own, in their order: an alert is "active" before the one that silences it
    is known. Once it silences what was posted last, it knows all that came before.
    """
    run = f"posted after {after}"
    labels = {"run_id": run, "node": "0", "severity": "critical"}
    post(port, [{"alertname": "RankscopeNodeDown", **labels}, {"alertname": "RankscopeRankDead", **labels}])
    wait_for(lambda: any(alert["status"]["inhibitedBy"] for alert in alerts_of(port, run)), "Alertmanager's inhibitor")


def post(port: int, alerts: list[dict[str, str]]) -> None:
    asked(port, "alerts", [{"labels": labels} for labels in alerts])


def alerts_of(port: int, run: str) -> list[dict[str, Any]]:
    return [alert for alert in asked(port, "alerts") if alert["labels"].get("run_id") == run]


@needs("prometheus-alertmanager")
def test_a_dead_node_silences_its_ranks_and_no_others(port: int) -> None:
    dead = {"alertname": "RankscopeRankDead", "run_id": "a", "severity": "critical"}
    alerts = [
        {"alertname": "RankscopeNodeDown", "run_id": "a", "node": "1", "severity": "critical"},
        {**dead, "node": "1", "rank": "4"},
        {**dead, "node": "1", "rank": "5"},
        {**dead, "node": "0", "rank": "0"},
        {"alertname": "RankscopeStraggler", "run_id": "a", "rank": "2", "severity": "warning"},
    ]
    assert silenced(port, alerts) == {
        ("RankscopeRankDead", "4"), ("RankscopeRankDead", "5"), ("RankscopeStraggler", "2")}  # fmt: skip


@needs("prometheus-alertmanager")
def test_a_run_that_is_over_silences_its_parts(port: int) -> None:
    alerts = [
        {"alertname": "RankscopeRunDied", "run_id": "b", "severity": "critical"},
        {"alertname": "RankscopeExporterDown", "run_id": "b", "node": "1", "severity": "critical"},
        {"alertname": "RankscopeRankDead", "run_id": "b", "node": "0", "rank": "1", "severity": "critical"},
    ]
    assert silenced(port, alerts) == {("RankscopeExporterDown", ""), ("RankscopeRankDead", "1")}
