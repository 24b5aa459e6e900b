"""Rules and alerts: Prometheus' own checks, and that names, anchors and pages in them exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from analyzers.kinds import KINDS
from analyzers.policy import SHARED
from analyzers.report.runbook_sections import section
from analyzers.settings.policy import ConfigurationPolicy
from tests.programs import needs, program
from watch.exporting.metrics.catalogue import METRICS

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "grafana" / "prometheus"
RULES = [rule for name in ("recording.yml", "alerts.yml")
         for group in yaml.safe_load((PROMETHEUS / name).read_text())["groups"] for rule in group["rules"]]  # fmt: skip
ALERTS: list[dict[str, Any]] = [rule for rule in RULES if "alert" in rule]


def accepts(name: str, *arguments: str | Path) -> None:
    done = subprocess.run([program(name), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("promtool")
def test_promtool_accepts_the_configuration() -> None:
    accepts("promtool", "check", "config", PROMETHEUS / "prometheus.yml")


@needs("promtool", "amtool")
def test_the_commands_of_the_page_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of docs/alerting.md that check files, as they stand there: the rules, their tests, the receivers."""
    page = (ROOT / "docs" / "alerting.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?m)^    ((?:promtool|amtool) .*?)(?:\s{2,}#.*)?$", page)
    assert [command.split()[:2] for command in commands] == [
        ["promtool", "check"], ["promtool", "test"], ["amtool", "check-config"]]  # fmt: skip
    monkeypatch.chdir(ROOT)
    for name, *arguments in map(shlex.split, commands):
        accepts(name, *arguments)


def test_each_alert_has_a_case_that_fires_and_one_that_is_silent() -> None:
    names = {case["name"] for case in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]}
    assert names == {f"{rule['alert']} {what}" for rule in ALERTS for what in ("fires", "is silent")}


def test_metrics_in_rules_exist() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    for rule in RULES:
        used = set(re.findall(r"(?<![:\w])rankscope_\w+", rule["expr"]))
        assert used <= set(METRICS), rule
        assert set(re.findall(r"run:\w+:\w+", rule["expr"])) <= recorded, rule


def alert(name: str) -> dict[str, Any]:
    (found,) = [rule for rule in ALERTS if rule["alert"] == f"Rankscope{name}"]
    return found


def numbers(name: str) -> set[float]:
    """Limits that an alert compares with."""
    return {float(number) for number in re.findall(r"(?:[<>]=?) (\d[\d.e]*)", alert(name)["expr"])}


def test_alerts_begin_where_advice_does() -> None:
    settings = ConfigurationPolicy()
    assert numbers("CommunicationPartlyExposed") == {SHARED.cost_ratio, SHARED.large_share_ratio}
    assert numbers("CommunicationExposed") == {SHARED.large_share_ratio}
    assert numbers("BubbleModerate") == {SHARED.large_share_ratio, SHARED.severe_share_ratio}
    assert numbers("Bubble") == {SHARED.severe_share_ratio}
    assert numbers("GpuIdle") == {settings.utilisation_ratio}


def test_every_critical_kind_has_an_alert() -> None:
    """One rule catches them all, but those that have a critical alert of their own, which links to the kind."""
    (excluded,) = re.findall(r'kind!~"([\w|]+)"', alert("CriticalFinding")["expr"])
    for kind in excluded.split("|"):
        assert kind in KINDS
        own = [rule for rule in ALERTS if f"&kind={kind}" in rule["annotations"]["dashboard_url"]]
        assert "critical" in {rule["labels"]["severity"] for rule in own}, kind


PAGES = {title.lower().replace(" ", "-") for title in
         re.findall(r'\(\w+\.\w+, "([\w ]+)"', (ROOT / "dashboard" / "navigation.py").read_text())}  # fmt: skip


def _address(text: str, label: str) -> str:
    """What stands behind the address that the run's settings give; without one, all of it is left out."""
    found = re.fullmatch(
        r"\{\{ with printf \"last_over_time\(rankscope_run_links_info\{run_id=%q, (\w+)!=''\}\[1d\]\)\" \$labels.run_id"
        r" \| query \}\}\{\{ \. \| first \| label \"(\w+)\" \}\}(.*)\{\{ end \}\}",
        text,
    )
    assert found is not None
    assert found[1] == found[2] == label
    return found[3]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_each_alert_says_what_to_do(alert: dict[str, Any]) -> None:
    assert re.fullmatch(r"Rankscope([A-Z][a-z]+)+", alert["alert"])
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "explain", "runbook_url", "dashboard_url"}
    assert "{{" not in notes["summary"]  # it is what people group and count by
    anchor = notes["explain"].removeprefix("rankscope explain ")
    assert section(anchor) is not None
    assert _address(notes["runbook_url"], "runbook") == anchor
    page, _, query = _address(notes["dashboard_url"], "dashboard").removeprefix("/").partition("?")
    assert page in PAGES | {""}
    kinds = re.findall(r"finding\w*\{kind=\"(\w+)\"", alert["expr"])
    assert re.findall(r"&kind=(\w+)", query)[: len(kinds)] == kinds, "what an alert is about is what its link shows"
    assert page == "findings" or "&kind" not in query
    assert set(re.findall(r"&kind=(\w+)", query)) <= set(KINDS)
