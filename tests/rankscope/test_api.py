"""`rankscope.open`: the same facts as the commands, as Python values."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from typer.testing import CliRunner

import rankscope
from analyzers.account.by_step import account_by_step
from probes.tape.rundir import RunDir
from rankscope import api
from rankscope.api import Evidence, Run
from rankscope.cli import app
from store import Store
from tests.factories import make_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api")
    make_run(path, ranks=4, steps=80, slow={3: 1.5}, phase="forward")
    return path / "runs"


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    opened = rankscope.open(folder)
    assert isinstance(opened, Run)
    return opened


def test_a_folder_of_runs_is_its_newest_run(folder: Path, run: Run) -> None:
    assert run.path == (folder / "latest").resolve()
    assert isinstance(rankscope.open(folder / "latest"), Run)


def test_findings_and_verdict(run: Run) -> None:
    assert "Rank 3" in run.verdict
    assert run.findings[0].kind == "straggler"
    assert run.diagnose() is run.diagnose(), "nothing was recorded in between"
    assert run.verdict in repr(run)
    assert "Rank 3" in run._repr_markdown_()
    assert run.report()["findings"]
    assert run.state.word == "finished" or run.state.reason


def test_records_as_tables(run: Run) -> None:
    result = run.sql("SELECT rank, count(*) AS n FROM steps GROUP BY rank ORDER BY rank")
    assert result.to_dicts() == [{"rank": rank, "n": 80} for rank in range(4)]
    assert result.to_arrow().num_rows == 4
    assert result.to_pandas()["n"].sum() == 320
    assert result["rank"] == [0, 1, 2, 3]
    assert run.steps("loss").columns == ("attempt", "rank", "step", "loss")
    assert len(run.steps()) == 320
    with pytest.raises(ValueError, match="not allowed"):
        run.sql("DROP TABLE steps")
    assert len(run.sql("SELECT step FROM steps LIMIT 5", max_rows=5)["step"]) == 5
    with pytest.raises(ValueError, match="more than 5 rows: aggregate, or set max_rows"):
        run.sql("SELECT step FROM steps LIMIT 6", max_rows=5)
    assert "<td>" in result._repr_html_()


def test_the_account_adds_up_to_the_step(run: Run) -> None:
    account = run.account()
    assert account.ns.shape == (4, 80, len(account.classes))
    took = np.array(run.steps("duration_ns")["duration_ns"], dtype=float).reshape(4, 80)
    assert np.nansum(account.ns, axis=2) == pytest.approx(took, rel=1e-6)
    forward = np.nanmedian(account.of("forward"), axis=1)
    assert forward[3] > 1.3 * forward[0]
    assert run.account(first_step=11, last_step=20).ns.shape[1] == 10
    assert "rank 3" in account._repr_html_()


def test_waits_that_were_not_recorded_are_not_zero(run: Run) -> None:
    with (
        Store.open(RunDir.open(run.path)) as store,
        store.session(steps="SELECT * REPLACE (NULL::BIGINT AS collective_wait_ns) FROM steps") as of_a_gpu,
    ):
        account = account_by_step(of_a_gpu)
    assert np.isnan(account.of("waiting")).all()
    assert np.isfinite(account.of("forward")).all()


def test_two_runs_are_compared(run: Run, tmp_path: Path) -> None:
    other = rankscope.open(make_run(tmp_path, ranks=4, steps=80).path)
    assert isinstance(other, Run)
    compared = run.compare(other)
    assert compared.speed is not None
    assert [finding.kind for finding in compared.only_a] == ["straggler"]


def test_files_of_any_job(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "[rank2]: Traceback (most recent call last):\n[rank2]: RuntimeError: CUDA error: an illegal memory access\n"
    )
    evidence = rankscope.open(log)
    assert isinstance(evidence, Evidence)
    assert evidence.verdict
    with pytest.raises(ValueError, match="no run at"):
        rankscope.open(tmp_path / "nowhere")


def test_a_process_with_a_module_of_the_same_name_gets_an_error(tmp_path: Path) -> None:
    (tmp_path / "store.py").write_text("ITEMS = 3\n")
    code = "import store, rankscope\ntry:\n    rankscope.open('.')\nexcept ImportError as error:\n    print(error)"
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "its own module 'store'" in done.stdout, done


def test_every_cell_of_the_notebook_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are executed as a kernel does: the last expression is what is shown."""
    monkeypatch.setenv("RUNS", str(folder))
    notebook = json.loads((ROOT / "examples" / "api-quickstart.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    names: dict[str, Any] = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "committed without outputs"
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, type_ignores=[]), "notebook", "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))  # noqa: S307
    run, *_, report, comparison = [value for value in shown if value is not None]
    assert isinstance(run, Run)
    assert report == run.verdict
    assert comparison is names["comparison"]
    assert set(names["waiting_ms"] > 0) == {True}


def test_parameters_empty_results_and_equal_names(run: Run) -> None:
    assert run.sql("SELECT count(*) AS n FROM steps WHERE rank = ? AND step > ?", [3, 40])["n"] == [40]
    assert run.sql("SELECT count(*) AS n FROM steps WHERE rank = $rank", {"rank": 3})["n"] == [80]
    empty = run.sql("SELECT rank, loss, host FROM steps JOIN ranks USING (attempt, rank) WHERE false")
    assert empty.types == ("INTEGER", "DOUBLE", "VARCHAR")
    assert [str(kind) for kind in empty.to_pandas().dtypes] == ["int32", "float64", "object"]
    assert [str(field.type) for field in empty.to_arrow().schema] == ["int32", "double", "string"]
    twice = run.sql("SELECT 1 AS x, 2 AS x, 3 AS x_2")
    assert twice.columns == ("x", "x_2", "x_2_2")
    assert twice.to_dicts() == [{"x": 1, "x_2": 2, "x_2_2": 3}]


def test_each_mistake_is_one_line_that_says_what_to_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.log").write_text("RuntimeError: CUDA error: an illegal memory access\n")
    evidence = rankscope.open_files(tmp_path / "job.log")
    for wrong in (evidence, str(run.path), run.path):
        with pytest.raises(ValueError, match=r"open_run") as raised:
            run.compare(wrong)  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)
    with pytest.raises(AttributeError, match="these are files"):
        evidence.sql("SELECT 1")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no run at"):
        rankscope.open_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a run's folder, not a job's files"):
        _ = rankscope.open_files(run.path).verdict
    monkeypatch.setitem(sys.modules, "pytz", None)  # as where it is not installed
    with pytest.raises(ValueError, match="make_timestamp"):
        run.sql("SELECT to_timestamp(start_ns / 1e9) FROM steps")
    assert run.sql("SELECT make_timestamp(start_ns // 1000) FROM steps LIMIT 1").rows


def test_a_comparison_says_what_the_command_prints(run: Run, tmp_path: Path) -> None:
    other = rankscope.open_run(make_run(tmp_path, ranks=4, steps=80).path)
    compared = run.compare(other)
    printed = CliRunner().invoke(app, ["compare", str(run.path), str(other.path)], env={"COLUMNS": "300"}).output
    assert compared.sentence in " ".join(printed.split())
    assert compared.sentence in repr(compared)
    assert "only in" in compared._repr_markdown_()
    gate = ["compare", str(other.path), str(run.path), "--fail-on"]
    found = CliRunner().invoke(app, [*gate, "findings"])
    assert (found.exit_code, "straggler" in found.stderr) == (1, True)
    assert CliRunner().invoke(app, [*gate, "loss"]).exit_code == 0
    assert CliRunner().invoke(app, [*gate, "speed"]).exit_code == 2


def test_a_notebook_shows_a_finding_and_a_diagnosis(run: Run) -> None:
    finding = run.findings[0]
    assert repr(finding) == f"Finding({finding.id} (warning, fired): {finding.summary})"
    shown = finding._repr_markdown_()
    assert shown.startswith("**straggler-0-r3** (warning, fired): Rank 3 "), shown
    assert "| evidence | |" in shown
    assert run.diagnose()._repr_markdown_() == run._repr_markdown_()
    assert repr(run.diagnose()) == f"Diagnosis({run.verdict})"


def test_a_rank_whose_stack_was_not_taken_has_none(folder: Path) -> None:
    run = rankscope.open_run(folder)
    run.path.joinpath("stacks").mkdir(exist_ok=True)
    for name, text in (("attempt-0-rank-00000.txt", ""), ("attempt-0-rank-00001.txt", "File train.py, line 3\n")):
        run.path.joinpath("stacks", name).write_text(text)
    assert run.stacks == {"attempt-0-rank-00001.txt": "File train.py, line 3\n"}


def test_a_data_frame_whose_package_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("polars", "pandas"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=f"^to_{package} needs {package}: pip install {package}$"):
            getattr(run.steps("loss"), f"to_{package}")()


def test_the_api_is_listed_and_its_hints_resolve() -> None:
    assert set(rankscope.__all__) <= set(dir(rankscope))
    for name in api.__all__:
        one = getattr(api, name)
        members = [one] if not isinstance(one, type) else [one, *(v for v in vars(one).values() if callable(v))]
        for member in members:
            get_type_hints(getattr(member, "fget", member))


_ROW = re.compile(r"^\| `(\w+)`[^|]*\| (.*) \|$", re.MULTILINE)
_TOLD = re.compile(r"`(\w+)[`(\[]")
RETURNED = {
    name: set(_TOLD.findall(cell))
    for name, cell in _ROW.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    if hasattr(api, name)
}


@pytest.mark.parametrize("name", RETURNED)
def test_the_documented_names_are_those_of_the_class(name: str) -> None:
    one, told = getattr(api, name), RETURNED[name]
    fields = {field.name for field in dataclasses.fields(one)} if dataclasses.is_dataclass(one) else set()
    assert told >= {field for field in fields if not field.startswith("_")}
    if name in ("AccountByStep", "QueryResult"):  # their rows name classes of time and columns, too
        return
    hints = get_type_hints(one).values()
    known = {*dir(one), *fields, *api.__all__}
    for hint in [*hints, *(part for whole in hints for part in get_args(whole))]:
        known |= {*dir(hint), *getattr(hint, "__annotations__", ())}
    assert told <= known


def test_figures_are_those_of_the_finding_s_page(run: Run) -> None:
    found = run.figures(run.findings[0])
    assert found
    assert all(isinstance(one, api.Drawing) and one.title and one.figure.data for one in found)


def test_a_mistake_is_one_line_and_its_class_is_in_the_api(run: Run) -> None:
    mistakes = [
        (lambda: run.sql("SELECT nope FROM steps"), api.StoreError, "Candidate bindings"),
        (lambda: run.sql("SELECT 1\nFROM stepz"), api.StoreError, "(line 2)"),
        (lambda: run.steps("los"), api.StoreError, '"loss"'),
        (lambda: run.account().of("wait"), ValueError, "the classes are"),
        (lambda: run.sql("SELECT 1 AS a")["b"], ValueError, "the columns are a"),
        (lambda: rankscope.open_run(run.path / "gone"), api.RunError, "no run at"),
    ]
    for mistake, kind, words in mistakes:
        with pytest.raises(kind) as told:
            mistake()
        assert words in str(told.value)
        assert len(str(told.value).splitlines()) == 1
