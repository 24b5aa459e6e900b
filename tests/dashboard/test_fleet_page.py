"""The page of the fleet: who stands out over all runs of the folder, and the list that keeps a job off them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from analyzers.fleet.fleet import fleet
from benchmarks.scale.fleet import BAD_HOSTS, histories
from dashboard.data.processes.fleet_process import FleetAnswer
from dashboard.views import fleet as fleet_page
from tests.dashboard.opened import charts, open_page, shown
from tests.factories import make_run
from tests.waiting import wait_for


def looked_at(runs: Path) -> AppTest:
    app = open_page(runs, "fleet")
    wait_for(lambda: "Hosts: " in shown(app) or (app.run() and False), "the fleet")
    assert not app.exception, [error.value for error in app.exception]
    return app


def test_hosts_of_two_runs_with_their_incidents(tmp_path: Path) -> None:
    make_run(tmp_path, ranks=2, steps=20, kill={1: 20})
    make_run(tmp_path, ranks=2, steps=20)
    broken = tmp_path / "runs" / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("[]")
    app = looked_at(tmp_path / "runs")
    (host,) = app.dataframe[0].value.to_dict("records")
    assert (host["name"], host["runs"], host["runs with trouble"], host["incidents"]) == (
        "node-0", 2, 1, "rank lost 1",
    )  # fmt: skip
    assert host["from"] < host["per 1,000 h"] < host["to"]
    text = shown(app)
    assert host["hours"] > 0, "a run of a second has taken time"
    assert "Hours between failures: 0.000" in text
    assert "No host or device has more trouble than chance explains." in text
    assert not app.code, "nothing to copy where no host stands out"


def test_suspicious_hosts_stand_first_and_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred simulated runs: their histories stand in for the diagnosis of two hundred folders."""
    make_run(tmp_path, ranks=1, steps=5)
    found = FleetAnswer(fleet=fleet(histories(200, num_hosts=64, seed=1)), problems={"old": "<b>damaged</b>"})
    monkeypatch.setattr(fleet_page, "fleet_in_process", lambda folder: found)
    app = looked_at(tmp_path / "runs")
    named = [host.name for host in found.fleet.hosts if host.is_suspicious]
    assert set(named) <= set(BAD_HOSTS)
    assert named
    table = app.dataframe[0].value
    assert list(table["name"][: len(named)]) == named
    assert set(table["suspicious"][: len(named)]) == {"yes"}
    slurm, kubernetes = (str(code.value) for code in app.code)
    assert slurm == f"--exclude={','.join(sorted(named))}"
    terms = json.loads(kubernetes)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] == sorted(named)
    assert named[0] in app.warning[0].value.replace("\\", "")
    assert "<b>" not in shown(app)
    assert "No configuration has two runs with a recorded speed." in shown(app)


def test_a_configuration_that_became_slower_is_drawn_with_its_versions(tmp_path: Path) -> None:
    """Real folders: seven runs, seven of the same that take a fifth longer, and two of another configuration."""
    for number in range(14):
        version, step_ms = ("2.12.0", 50.0) if number < 7 else ("2.13.0", 60.0)
        make_run(tmp_path, ranks=1, steps=40, step_ms=step_ms, seed=number, versions={"torch": version})
    for seed in range(2):
        make_run(tmp_path, ranks=1, steps=40, num_parameters=1000, seed=seed)
    app = looked_at(tmp_path / "runs")
    slower, other = app.dataframe[-1].value.to_dict("records")
    assert (slower["runs"], slower["changed at the same time"]) == (14, "torch 2.12.0 -> 2.13.0")
    assert float(slower["change"].removesuffix(" %")) == pytest.approx(-100 / 6, abs=1)
    assert float(slower["p"]) < 0.01
    assert (other["runs"], other["change"]) == (2, "too few runs to tell")
    (drawn,) = charts(app)
    assert "fleet-speed-" in drawn.key
    assert [warning.value for warning in app.warning if "Slower than before" in warning.value]
