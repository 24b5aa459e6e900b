"""Grafana's dashboards, as far as they can be checked without a Grafana server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from compose_spec import PyCompose
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.build_dashboards import FOLDER, PAGES, file_of, rendered
from tests.grafana.test_prometheus_rules import PAGES as OUR_PAGES
from tests.grafana.test_prometheus_rules import RULES
from watch.exporting.metrics.catalogue import METRICS

ROOT = Path(__file__).resolve().parents[2]
BOARDS = {page.uid: json.loads(file_of(page).read_text(encoding="utf-8")) for page in PAGES}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}


def drawn(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board: dict[str, Any]) -> Iterator[str]:
    for panel in drawn(board):
        yield from (target["expr"] for target in panel["targets"])


def names_in(query: str) -> set[str]:
    return set(re.findall(r"(?<![:\w])rankscope_\w+", query))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_files_are_what_the_descriptions_say(page: Any) -> None:
    assert file_of(page).read_text(encoding="utf-8") == rendered(page), "python grafana/build_dashboards.py"


def test_there_are_no_other_files() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == {file_of(page).name for page in PAGES}


@pytest.mark.parametrize("board", BOARDS.values(), ids=lambda board: board["uid"])
def test_a_board_can_be_imported_anywhere(board: dict[str, Any]) -> None:
    assert board["id"] is None
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert "datasource" in variables
    for panel in drawn(board):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    used = set(re.findall(r"\$(\w+)", json.dumps([panel["targets"] for panel in drawn(board)])))
    assert used <= variables | {"__rate_interval"}


OF_PROMETHEUS = {"definition", "step", "titleFormat", "textFormat"}
"""Keys of Prometheus' own part of a variable and an annotation, which Grafana's schema leaves open."""


def unknown(given: Any, understood: Any) -> Iterator[str]:
    """Keys and values of ours that are not there once Grafana's own library has read the page and written it again."""
    if isinstance(given, dict):
        for key, value in given.items():
            if key in understood:
                yield from unknown(value, understood[key])
            elif value not in (None, "", [], {}, False) and key not in OF_PROMETHEUS:
                yield key
    elif isinstance(given, list):
        assert len(given) == len(understood)
        for ours, theirs in zip(given, understood, strict=True):
            yield from unknown(ours, theirs)
    elif given != understood:
        yield f"{given!r}, not {understood!r}"


@pytest.mark.parametrize("board", BOARDS.values(), ids=lambda board: board["uid"])
def test_grafana_knows_every_key_and_unit(board: dict[str, Any]) -> None:
    register_default_plugins()
    understood = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert list(unknown(board, understood)) == []
    named = {value for name, value in vars(units).items() if not name.startswith("_") and isinstance(value, str)}
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in drawn(board)} <= named


def test_a_key_that_grafana_does_not_know_is_found() -> None:
    register_default_plugins()
    board = json.loads(json.dumps(BOARDS["rankscope-run"]))
    panel = drawn(board)[0]
    panel["fieldConfig"]["defaults"]["unitt"] = "s"
    panel["options"]["colourMode"] = "value"
    understood = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert sorted(unknown(board, understood)) == ["colourMode", "unitt"]


@pytest.mark.parametrize("board", BOARDS.values(), ids=lambda board: board["uid"])
def test_links_lead_to_pages_that_exist(board: dict[str, Any]) -> None:
    ours = [link["url"] for link in board["links"] if link["url"].startswith("${dashboard}/")]
    assert {url.removeprefix("${dashboard}/").partition("?")[0] for url in ours} <= OUR_PAGES | {""}
    assert {link["url"] for link in board["links"]} - set(ours) == {
        f"/d/{uid}" for uid in BOARDS if uid != board["uid"]
    }


@pytest.mark.parametrize("board", BOARDS.values(), ids=lambda board: board["uid"])
def test_panels_do_not_overlap(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("board", BOARDS.values(), ids=lambda board: board["uid"])
def test_queries_parse_and_ask_for_what_exists(board: dict[str, Any]) -> None:
    for query in queries(board):
        promql_parser.parse(query.replace("$__rate_interval", "1m").replace("$", ""))
        assert names_in(query) <= set(METRICS), query
        assert set(re.findall(r"run:\w+:\w+", query)) <= RECORDED, query


def test_every_metric_is_asked_for_somewhere() -> None:
    """A metric that neither a panel nor a rule uses is a metric that nobody looks at."""
    used = {name for board in BOARDS.values() for query in queries(board) for name in names_in(query)}
    used |= {name for rule in RULES for name in names_in(rule["expr"])}
    used |= {name for name in METRICS for rule in RULES if name in str(rule.get("annotations"))}
    assert set(METRICS) == used


def test_compose_is_what_the_specification_says() -> None:
    """By a parser of the Compose specification, which takes no key that it does not know."""
    text = (ROOT / "grafana" / "compose.yaml").read_text()
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)  # variables are replaced before it is read
    compose = PyCompose.from_yaml(text)
    compose.validate()  # volumes that are named are there
    assert sorted(compose.service_names()) == ["alertmanager", "grafana", "prometheus"]
    with pytest.raises(ValueError, match="network_mod"):
        PyCompose.from_yaml(text.replace("network_mode:", "network_mod:", 1)).validate()


def test_provisioning_and_compose_name_files_that_exist() -> None:
    folder = ROOT / "grafana"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or (folder / source).exists(), volume
    for path in folder.glob("provisioning/*/*.yaml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1
