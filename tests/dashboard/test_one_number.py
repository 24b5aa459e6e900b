"""One number a fact: report, pages, `top` and metrics of one run show the same, each rounded in its own way.

Four runs that have ended: a slow rank, a pipeline with its bubble, a run on a GPU whose model is known, and the first
half of a pipeline, whose other ranks' folders are missing.
"""

from __future__ import annotations

import html
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from analyzers.diagnose import Diagnosis, diagnose
from analyzers.fleet.history import history_of
from analyzers.report.html import diagnosis_page
from analyzers.report.json import to_json
from analyzers.report.markdown import to_markdown
from analyzers.report.terminal import diagnosis_text
from analyzers.report.terminal.ranks_now import draw_ranks
from probes.tape.rundir import RunDir
from store import Store
from tests.dashboard.opened import open_page, shown
from tests.support.recorded_gpu import copy_gpu_run
from tests.support.simulator.faults import Fault
from tests.support.simulator.layout import Layout
from tests.support.simulator.recording import Scenario
from tests.support.simulator.scenario import simulate
from tests.support.simulator.tapes import write
from watch.exporting.metrics.node_metrics import NodeMetrics

SCENARIOS = {
    "slow": Scenario(
        seed=3, layout=Layout(dp_shard=4), steps=90,
        fault=Fault(kind="slow_compute", step=40, rank=2, factor=1.7),
    ),
    "pipeline": Scenario(seed=4, layout=Layout(pp=4, dp_shard=2, schedule="1f1b", microbatches=8), steps=70),
    "part": Scenario(seed=5, layout=Layout(pp=2, dp_shard=2, schedule="1f1b", microbatches=4), steps=60),
}  # fmt: skip
PAGES = {
    "slow": ("overview", "goodput", "collectives", "findings"),
    "pipeline": ("overview", "goodput", "collectives", "pipeline"),
    "part": ("overview", "goodput", "collectives", "system"),
    "train": ("overview", "collectives"),
}
"""Pages with a number of the run."""
_NUMBER = r"(-?(?<![\d,])\d[\d,]*(?:\.\d+)?)"
"""Tried once in a list of numbers without spaces, of which the figures of a page have long ones."""
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@dataclass(frozen=True, slots=True)
class Shown:
    """A number as it is shown, and how far it may be from another because of its rounding."""

    where: str
    value: float
    rounding: float


@dataclass(frozen=True, slots=True)
class Surfaces:
    """Everything that shows the run, as text; the JSON and the samples as values."""

    diagnosis: Diagnosis
    texts: Mapping[str, str]
    values: Mapping[str, Mapping[str, float]]


def surfaces_of(path: Path) -> Surfaces:
    """Render all of them."""
    folder = RunDir.open(path)
    manifest = folder.manifest()
    terminal = Console(width=400, no_color=True, record=True, file=StringIO())
    with Store.open(folder) as store:
        diagnosis = diagnose(store, manifest, stacks_dir=folder.stacks)
        diagnosis_text.render(diagnosis, terminal)
        page = diagnosis_page.render(store, diagnosis, manifest).decode()
        samples = NodeMetrics(manifest, node_rank=0).measure(store, time.time_ns())
        hours = history_of(store, manifest, diagnosis).hours
    texts = {
        "terminal": terminal.export_text(),
        "markdown": html.unescape(to_markdown(diagnosis, manifest).replace("\\", "")),
        "html": re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page))),
    }  # fmt: skip
    screen = Console(width=200, no_color=True, record=True, file=StringIO())
    screen.print(draw_ranks(folder, name="run", height=40, now_ns=time.time_ns()).table)
    texts["top"] = screen.export_text()
    for name in PAGES[path.name]:
        app = open_page(path.parent, name, run=path.name)
        assert not app.exception
        tiles = "\n".join(f"{metric.label}: {metric.value} ({metric.delta})" for metric in app.metric)
        texts[f"page {name}"] = f"{shown(app)}\n{tiles}".replace("\\", "")
    plain = to_json(diagnosis)
    values = {
        "json": {name: value for name, value in plain["run"].items() if isinstance(value, (int, float))},
        "json goodput": {
            name: number
            for name, number in {**plain["goodput"], **plain["goodput"]["seconds"]}.items()
            if isinstance(number, (int, float))
        },
        "metrics": {sample.name: sample.value for sample in samples if not sample.labels},
        "metrics time": {
            sample.labels["category"]: sample.value for sample in samples if sample.name == "rankscope_time_seconds"
        },
        "fleet": {"hours": hours},
    }  # fmt: skip
    return Surfaces(diagnosis, texts, values)


def in_text(surfaces: Surfaces, where: str, pattern: str, scale: float = 1.0) -> Iterator[Shown]:
    """Each number that the pattern finds there: its first group, with a decimal prefix or a unit as second group."""
    for match in re.finditer(pattern.replace("NUMBER", _NUMBER), surfaces.texts[where]):
        digits = match.group(1).replace(",", "")
        unit = (match.group(2) or "") if match.re.groups > 1 else ""
        factor = scale * _PREFIXES.get(unit, 1.0) * {"ms": 1.0, "s": 1e3}.get(unit, 1.0)
        last = 10.0 ** -len(digits.partition(".")[2])
        if (unit in _PREFIXES and unit) or where.startswith("page") or where == "markdown":  # three or four digits
            last = max(last, 10.0 ** (len(digits.partition(".")[0]) - 3))
        yield Shown(where, float(digits) * factor, 0.51 * last * factor)


def of_values(surfaces: Surfaces, where: str, name: str, scale: float = 1.0) -> Iterator[Shown]:
    if name in surfaces.values[where]:
        yield Shown(f"{where} {name}", surfaces.values[where][name] * scale, 1e-3 * scale)


Look = Callable[[Surfaces], Iterator[Shown]]


def text(where: str, pattern: str, scale: float = 1.0) -> Look:
    return lambda surfaces: in_text(surfaces, where, pattern, scale)


def value(where: str, name: str, scale: float = 1.0) -> Look:
    return lambda surfaces: of_values(surfaces, where, name, scale)


FACTS: Mapping[str, tuple[Look, ...]] = {
    "step time (ms)": (
        value("json", "step_ms_median"), text("terminal", r"median step NUMBER ms"),
        text("markdown", r"step, median \| NUMBER ms"), text("html", r"NUMBER ms per step, median"),
        text("top", r"median step NUMBER ms"), text("page overview", r"Step time: NUMBER (ms|s)\b"),
    ),
    "tokens a second": (
        value("json", "tokens_per_s"), text("terminal", r"NUMBER tokens/s"),
        text("html", r"NUMBER tokens/s"), text("page overview", r"Tokens/s: NUMBER ?([kMGTP]?)\b"),
    ),
    "wall time (s)": (
        value("json", "wall_s"), value("json goodput", "wall_s"), value("fleet", "hours", 3600.0),
        text("terminal", r"Of NUMBER s of wall time"), text("html", r"NUMBER s wall time"),
        text("html", r"NUMBER s of wall time,"), text("markdown", r"wall time \| NUMBER s"),
    ),
    "goodput (%)": (
        value("json goodput", "goodput_ratio", 100.0), value("metrics", "rankscope_goodput_ratio", 100.0),
        text("terminal", r"wall time: NUMBER % training"), text("html", r"NUMBER % goodput"),
        text("page overview", r"Goodput: NUMBER %"), text("page goodput", r"Goodput: NUMBER %"),
        text("page collectives", r"Training: NUMBER %"),
    ),
    "bubble (%)": (
        text("terminal", r"The pipeline bubble is NUMBER %"), text("markdown", r"The pipeline bubble is NUMBER %"),
        text("html", r"The pipeline bubble is NUMBER %"), text("page pipeline", r"The pipeline bubble is NUMBER %"),
        text("page pipeline", r"Bubble: NUMBER %"),
    ),
    "planned bubble (%)": (
        text("terminal", r"with equal stages has NUMBER %"), text("page pipeline", r"Ideal: NUMBER %"),
        value("metrics", "rankscope_bubble_planned_ratio", 100.0),
    ),
    "imbalance (points)": (
        text("terminal", r"points: imbalance NUMBER,"), text("page pipeline", r"points: imbalance NUMBER,"),
        text("page pipeline", r"Imbalance: NUMBER %"),
    ),
    "straggler's first step": (
        text("terminal", r"was slow from step NUMBER"), text("terminal", r"steps NUMBER to \d+  rank"),
        text("top", r"was slow from step NUMBER"), text("markdown", r"was slow from step NUMBER"),
        text("html", r"was slow from step NUMBER"), text("page overview", r"was slow from step NUMBER"),
        text("page overview", r"steps NUMBER to \d+ · rank"), text("page findings", r"steps NUMBER to \d+ · rank"),
    ),
    "straggler's last step": (
        text("terminal", r"steps \d+ to NUMBER  rank"), text("page overview", r"steps \d+ to NUMBER · rank"),
        text("page findings", r"steps \d+ to NUMBER · rank"),
    ),
    "straggler's factor": (
        text("terminal", r"compute per step \(NUMBERx\)"), text("top", r"compute per step \(NUMBERx\)"),
        text("terminal", r"slowdown factor +NUMBERx"), text("markdown", r"compute per step \(NUMBERx\)"),
        text("html", r"compute per step \(NUMBERx\)"), text("page overview", r"compute per step \(NUMBERx\)"),
        text("page findings", r"compute per step \(NUMBERx\)"),
    ),
    "MFU (%)": (
        value("json", "mfu_ratio", 100.0), text("terminal", r"NUMBER % MFU"), text("html", r"NUMBER % MFU"),
        text("page overview", r"MFU: NUMBER %"),
    ),
    "ranks with records": (
        value("json", "num_ranks"), text("terminal", r"  NUMBER of 4 ranks  "),
        text("markdown", r"ranks \| NUMBER of 4 on"), text("html", r"NUMBER of 4 ranks"),
        text("page system", r"Ranks: NUMBER of 4"),
    ),
    "last step": (
        value("json", "steps"), text("terminal", r"  NUMBER steps  "),
        text("markdown", r"ranks \| [\d of]+ on [^|]*\|\n\| steps \| NUMBER"),
        text("html", r"\d ranks? NUMBER steps\b"), text("top", r"finished  step NUMBER "),
        text("page overview", r"\bStep: NUMBER"),
    ),
}  # fmt: skip
ALWAYS = ("step time (ms)", "tokens a second", "wall time (s)", "goodput (%)", "last step")
SHOWN_OF = {
    "slow": (*ALWAYS, "straggler's first step", "straggler's last step", "straggler's factor"),
    "pipeline": (*ALWAYS, "bubble (%)", "planned bubble (%)", "imbalance (points)"),
    "part": (*ALWAYS, "ranks with records", "MFU (%)"),
    "train": ("step time (ms)", "tokens a second", "wall time (s)", "last step", "MFU (%)"),
}


@pytest.fixture(scope="module", params=SHOWN_OF)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Surfaces]:
    name = request.param
    folder = tmp_path_factory.mktemp("runs")
    if name in SCENARIOS:
        write(simulate(SCENARIOS[name]), folder / name)
    else:
        copy_gpu_run(name, folder)
    if name == "part":
        written = RunDir.open(folder / name)
        known = {"device_name": "NVIDIA H100 80GB HBM3", "flops_per_token": 2.4e9}
        written.write_manifest(written.manifest() | known)
        for _, rank, tapes in written.rank_dirs():
            if rank >= 2:
                shutil.rmtree(tapes)
    return name, surfaces_of(folder / name)


def test_a_fact_is_the_same_number_everywhere(run: tuple[str, Surfaces]) -> None:
    name, surfaces = run
    differing = []
    for fact in SHOWN_OF[name]:
        looked = [list(look(surfaces)) for look in FACTS[fact]]
        found = [one for of_look in looked for one in of_look]
        missing = [number for number, of_look in enumerate(looked) if not of_look]
        assert not missing, (fact, missing, found)
        first = found[0]
        differing += [
            (fact, first, one) for one in found[1:] if abs(one.value - first.value) > one.rounding + first.rounding
        ]
    assert not differing, "\n".join(map(str, differing))


def test_exposed_communication_is_one_measure_in_the_finding_the_account_and_the_metric(
    run: tuple[str, Surfaces],
) -> None:
    """The windows differ, and each is named: the whole run, the steps of the finding, the newest steps."""
    name, surfaces = run
    seconds, wall_s = surfaces.values["json goodput"], surfaces.values["json goodput"]["wall_s"]
    if "communication" not in seconds:  # not measured is not zero
        assert "Exposed: –" in surfaces.texts["page collectives"]
        assert "communication" not in surfaces.values["metrics time"]
        return
    account = surfaces.diagnosis.goodput
    label = "Exposed" if account is not None and account.is_split else "Communication or waiting for others"
    page = next(in_text(surfaces, "page collectives", rf"{label}: NUMBER %"))
    assert page.value == pytest.approx(100 * seconds["communication"] / wall_s, abs=page.rounding + 0.01)
    assert surfaces.values["metrics time"]["communication"] == pytest.approx(seconds["communication"], abs=1e-3)
    found = [one for one in surfaces.diagnosis.findings if one.kind == "exposed_communication"]
    if name == "pipeline":
        assert f"from step {found[0].first_step} to {found[0].last_step}" in found[0].summary
        newest = surfaces.values["metrics"]["rankscope_exposed_communication_ratio"]
        assert found[0].evidence["exposed_transfer_ratio"] == pytest.approx(newest, abs=0.002)
