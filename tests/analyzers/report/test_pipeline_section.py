"""The bubble in text, on the page, in the ticket and in JSON, of a run whose truth is known."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from analyzers.diagnose import Diagnosis, diagnose
from analyzers.policy import SHARED
from analyzers.report import markdown
from analyzers.report.html import diagnosis_page as html
from analyzers.report.json import to_json
from analyzers.report.terminal import diagnosis_text as text
from store import Store
from tests.support.simulator import QUIET, Fault, Layout, Scenario, simulate, write

PIPELINE = Layout(pp=4, dp_shard=2, microbatches=8, layers=1, schedule="1f1b")


@pytest.fixture(params=["uneven_stages", "slow_data"])
def diagnosed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Store, Diagnosis]]:
    rank = 4 if request.param == "uneven_stages" else 0
    fault = Fault(kind=request.param, rank=rank, step=1, factor=1.3)
    run = write(simulate(Scenario(seed=5, layout=PIPELINE, steps=24, noise=QUIET, fault=fault)), tmp_path / "run")
    with Store.open(run) as store:
        yield request.param, store, diagnose(store, run.manifest())


def test_every_report_says_what_makes_the_pipeline_idle(diagnosed: tuple[str, Store, Diagnosis]) -> None:
    fault, store, diagnosis = diagnosed
    (numbers,) = (found["evidence"] for found in to_json(diagnosis)["findings"] if found["kind"] == "bubble")
    parts = {name: numbers[f"excess_{name}_ratio"] for name in ("imbalance", "communication", "data", "order")}
    assert sum(parts.values()) == pytest.approx(numbers["excess_ratio"], abs=3e-4)
    assert numbers["idle_ratio"] - numbers["idle_expected_ratio"] == pytest.approx(numbers["excess_ratio"], abs=2e-4)
    assert numbers["idle_expected_ratio"] == pytest.approx(3 / 11, abs=1e-4)
    assert max(parts, key=lambda name: parts[name]) == ("imbalance" if fault == "uneven_stages" else "data")
    assert len(numbers["idle_ratio_by_rank"]) == PIPELINE.num_ranks
    assert len(numbers["idle_ratio_by_step"]) == 24 - SHARED.warm_up_steps
    assert numbers["heaviest_stage"] == (2 if fault == "uneven_stages" else None)

    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    text.render(diagnosis, console)
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    page = html.render(store, diagnosis, {}).decode()
    ticket = markdown.to_markdown(diagnosis, {})
    for report in (shown, page, ticket):
        assert "1f1b with equal stages has 27.3 %" in report
        assert "points: imbalance" in report
    for words in (">Pipeline<", "Bubble by rank, of this pipeline", "as it ran", "work a step, ms"):
        assert words in page
    if fault == "uneven_stages":
        assert "Stage 2 has the most work: moving 17 % of it" in shown
