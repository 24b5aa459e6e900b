"""A run on GPUs whose waits were not measured says so in text, page, JSON, metrics and dashboard; nothing prints 0."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from analyzers.diagnose import Diagnosis, diagnose
from analyzers.report.html.diagnosis_page import render as as_html
from analyzers.report.json import to_json
from analyzers.report.terminal.diagnosis_text import render as as_text
from analyzers.run.policy import StallPolicy
from probes.tape.rundir import RunDir
from store import Store
from tests.support.simulator import Layout, Scenario, simulate, write
from tests.waiting import wait_for
from watch.exporting.metrics.run_samples import account_samples

ZERO_SHARE = re.compile(r"(?<![\d.,])0(\.0+)? ?%")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Four GPUs without the plugin: only what their hosts record."""
    scenario = Scenario(
        seed=3, layout=Layout(dp_replicate=4), steps=20, on_devices=True, missing_tables=("collectives",)
    )
    return write(simulate(scenario), tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def diagnosis(run: RunDir) -> Diagnosis:
    with Store.open(run) as store:
        return diagnose(store, run.manifest())


def test_text(diagnosis: Diagnosis) -> None:
    """Not "0 % training, 82 % not measured" in Goodput."""
    output = io.StringIO()
    as_text(diagnosis, Console(file=output, width=400))
    text = output.getvalue()
    assert "No problems found" not in text
    assert re.search(r"Nothing was found .* of the step time, \d+ % was not measured", text)
    assert re.search(r"Goodput +Of [\d.]+ s of wall time: \d+ % not measured", text)
    assert "The cost of communication was not measured" in text
    assert not ZERO_SHARE.search(text), text


def test_json(diagnosis: Diagnosis) -> None:
    found = to_json(diagnosis)
    assert found["run"]["steps_not_measured_ratio"] > 0.9
    assert found["goodput"]["goodput_ratio"] is None
    assert found["goodput"]["seconds"]["unmeasured"] > 0
    assert found["goodput"]["seconds"]["training"] is None
    assert {of_rank["communication"] for of_rank in found["goodput"]["by_rank"].values()} == {None}
    assert "was not measured" in found["verdict"]


def test_html(run: RunDir, diagnosis: Diagnosis) -> None:
    with Store.open(run) as store:
        page = as_html(store, diagnosis, run.manifest()).decode()
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S))
    assert "was not measured" in text
    assert not ZERO_SHARE.search(text), text


def test_metrics(run: RunDir) -> None:
    """Neither the bubble's share nor the seconds of training are 0: they are left out."""
    with Store.open(run) as store:
        samples = list(account_samples(store, StallPolicy(), time.time_ns(), {}))
    seconds = {s.labels["category"]: s.value for s in samples if s.name == "rankscope_time_seconds"}
    assert seconds["unmeasured"] > 0
    assert not {"training", "gaps", "communication", "straggler", "bubble"} & seconds.keys()
    assert not {"rankscope_goodput_ratio", "rankscope_bubble_ratio"} & {sample.name for sample in samples}


@pytest.mark.parametrize("page", ["overview", "goodput"])
def test_dashboard(run: RunDir, page: str) -> None:
    from tests.dashboard.opened import open_page, shown

    app = open_page(run.path.parent, page, run=run.run_id)
    wait_for(lambda: "Goodput: " in shown(app) or (app.run() and False), "the account", deadline_s=60)
    assert not app.exception
    (value,) = re.findall(r"Goodput: (.*)", shown(app))
    assert not re.search(r"\d", value), value
