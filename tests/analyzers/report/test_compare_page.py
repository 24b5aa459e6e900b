"""`rankscope compare A B --html FILE`: both runs on one page that needs nothing else and obeys neither of them."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from analyzers.compare.two_runs import Side, compare
from analyzers.diagnose import diagnose
from analyzers.report.html.compare_page import render
from probes.tape.rundir import RunDir
from store import Store
from tests.analyzers.report.hostile import hostile_run
from tests.analyzers.report.test_files import Elements, figures_of
from tests.e2e.launched import rankscope
from tests.factories import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RunDir]:
    folder = tmp_path_factory.mktemp("compared")
    usual = {"config": {"optim": {"lr": 1e-3}, "train": {"steps": 60}}}
    before = make_run(folder / "a", ranks=4, steps=60, seed=1, **usual)
    usual["config"] = {"optim": {"lr": 3e-3}, "train": {"steps": 60}}
    after = make_run(folder / "b", ranks=4, steps=60, seed=2, step_ms=80.0, slow={3: 1.5}, **usual)
    return before, after


def test_the_page_holds_both_runs(runs: tuple[RunDir, RunDir], tmp_path: Path) -> None:
    page = tmp_path / "compared.html"
    done = rankscope("compare", *(str(run.path) for run in runs), "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert f"{page}  " in done.stdout
    elements = Elements(page.read_bytes())
    for run in runs:
        assert run.path.name in elements.text
    for words in ("x as long", "optim.lr", "0.001", "0.003", "Where the time went", "Straggler", "Step time"):
        assert words.lower() in elements.text.lower(), words
    assert "slowdown factor" in elements.text
    assert not re.findall(r"(?:factor|before)_\w+|\w+_(?:factor|before)\b", elements.text), "keys of the JSON report"
    figures = figures_of(page.read_bytes())
    assert len(figures) == 5, "loss, step time, two accounts of the time, and the templates"
    links = [value for _, attributes in elements.found for name, value in attributes.items() if name in ("src", "href")]
    assert [link for link in links if link and not link.startswith(("#", "data:"))] == []


def test_a_page_is_green_only_if_the_speeds_were_compared_and_the_second_run_ended_well(tmp_path: Path) -> None:
    def side(steps: int, **more: Any) -> Side:
        run = make_run(tmp_path / f"{steps}-{len(more)}", ranks=2, steps=steps, **more)
        store = opened.enter_context(Store.open(run))
        return Side(source=store, manifest=run.manifest(), diagnosis=diagnose(store, run.manifest()))

    def marked(before: Side, after: Side, *, is_compared: bool = True) -> str:
        elements = Elements(render(compare(before, after), before, after))
        (verdict,) = (of["class"] for _, of in elements.found if "verdict" in str(of.get("class")))
        assert ("The speeds were not compared." in elements.text) == (not is_compared)
        return str(verdict).removeprefix("card verdict ")

    with ExitStack() as opened:
        long, short = side(60), side(5)
        assert marked(long, long) == "clean"
        assert marked(short, short, is_compared=False) == "unjudged"
        assert marked(long, side(60, end="failed")) == "failed"


def test_json_stays_json(runs: tuple[RunDir, RunDir], tmp_path: Path) -> None:
    arguments = [*(str(run.path) for run in runs), "--format", "json", "--html", str(tmp_path / "x.html")]
    done = rankscope("compare", *arguments, "--fail-on", "slower:20")
    assert json.loads(done.stdout)["speed"]["ratio"] > 1.2
    assert done.returncode == 1, "it is slower beyond doubt"
    assert (tmp_path / "x.html").stat().st_size > 1_000_000


def test_hostile_names_are_text_and_a_bad_place_is_one_line(runs: tuple[RunDir, RunDir], tmp_path: Path) -> None:
    evil = hostile_run(tmp_path / "evil")
    page = tmp_path / "page.html"
    done = rankscope("compare", str(evil.path), str(runs[0].path), "--html", str(page))
    assert done.returncode == 0, done.stderr
    elements = Elements(page.read_bytes())
    assert [tag for tag, _ in elements.found if tag in ("img", "iframe", "object", "a")] == []
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    (tmp_path / "file").write_text("in the way")
    done = rankscope("compare", *(str(run.path) for run in runs), "--html", str(tmp_path / "file" / "page.html"))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
