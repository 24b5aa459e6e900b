"""The wheel in a separate environment with only what its metadata requires: no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rankscope
from probes.tape.format.writer import COMPLETE
from rankscope import api
from tests.factories import RankWriter, empty_run, make_run
from tests.rankscope.returned_types import revealed

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and its core dependencies (linked, not downloaded)."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,) = place.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True, timeout=100)
    (site,) = (place / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (metadata,) = importlib.metadata.distributions(path=[str(site)])
    for top_level in _needed(metadata.requires or []):
        (site / top_level.name).symlink_to(top_level)
    return place / "venv" / "bin" / "python"


def _needed(requirements: list[str]) -> Iterator[Path]:
    """What the distributions behind some requirements, and those behind theirs, put into site-packages."""
    known: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        if name in known or (asked.marker is not None and not asked.marker.evaluate({"extra": ""})):
            continue
        known.add(name)
        found = importlib.metadata.distribution(name)
        waiting += [Requirement(line) for line in found.requires or []]
        tops = {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}
        yield from (Path(str(found.locate_file(top))) for top in sorted(tops))


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": os.defpath}
    command = [str(python), "-m", "rankscope", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_analysis_on_a_laptop_without_torch(installed: Path, tmp_path: Path) -> None:
    folder = make_run(tmp_path, slow={2: 1.5}).path
    told = run(installed, "analyze", str(folder), "--format", "json", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    fired = [finding for finding in json.loads(told.stdout)["findings"] if finding["status"] == "fired"]
    assert [(finding["kind"], finding["ranks"]) for finding in fired] == [("straggler", [2])]
    drawn = run(installed, "report", str(folder), "--html", "page.html", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_doctor_says_what_is_missing_and_how_to_get_it(installed: Path, tmp_path: Path) -> None:
    told = run(installed, "doctor", "--format", "json", cwd=tmp_path)
    assert told.returncode == 0, told.stdout + told.stderr
    checks = {check["name"]: check for check in json.loads(told.stdout)["checks"]}
    for name, extra in {"torch": "train", "streamlit": "dashboard", "py-spy": "stacks"}.items():
        assert f"pip install 'rankscope[{extra}]'" in checks[name]["remedy"]


@pytest.mark.parametrize(
    ("arguments", "extra"), [(("export", "runs", "--out", "x"), "train"), (("dashboard", "."), "dashboard")]
)
def test_a_command_that_needs_more_says_so_in_one_line(
    installed: Path, tmp_path: Path, arguments: tuple[str, ...], extra: str
) -> None:
    told = run(installed, *arguments, cwd=tmp_path)
    assert told.returncode == 2
    assert told.stderr.count("\n") == 1
    assert f"pip install 'rankscope[{extra}]'" in told.stderr


def test_the_wheel_brings_the_runbook_and_the_types(installed: Path) -> None:
    (package,) = (installed.parent.parent / "lib").glob("python*/site-packages/rankscope")
    assert (package / "analyzers" / "report" / "runbook.md").is_file()
    assert not list(package.rglob("__pycache__/*.so")), "pure Python"


def test_a_plug_in_is_found_beside_the_wheel(installed: Path, tmp_path: Path) -> None:
    (site,) = (installed.parent.parent / "lib").glob("python*/site-packages")
    shutil.copytree(ROOT / "examples" / "plugin" / "rankscope_slow_save", site / "rankscope_slow_save")
    info = site / "rankscope_slow_save-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rankscope-slow-save\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[rankscope.analyzers]\nslow_save = rankscope_slow_save\n")
    folder = empty_run(tmp_path, world_size=1)
    writer = RankWriter(folder, rank=0)
    for step in range(1, 21):
        save_ns = 5 * 10**9 if step == 7 else 0
        row = {"start_ns": step * 10**10, "duration_ns": 6 * 10**9, "checkpoint_ns": save_ns, "committed": 1}
        writer.append("steps", COMPLETE, step=step, **row)
    writer.close()
    try:
        told = run(installed, "analyze", str(folder.path), cwd=tmp_path)
    finally:
        shutil.rmtree(info)
    assert "Rank 0 stopped training for 5.0 s to save at step 7 (plug-in slow_save)." in told.stdout, (
        told.stdout + told.stderr
    )
    assert "The limit is 2 s; it took 5.0 s." in told.stdout


PROGRAMS = sorted((ROOT / "examples" / "api").glob("*.py"))
(PLUGIN_OF_DOCS,) = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL | re.MULTILINE
)
NOT_INSTALLED = ("to_arrow", "to_pandas", "to_polars", "one.figure", "one.parameters")
"""Members whose types come from packages that are not in the wheel's environment, or have no types."""
TYPES = ROOT / "build" / "types-of-wheel"
"""Mypy's cache, kept for the next run of the tests: it recognises a file by its content, wherever it is installed."""


def check_types(installed: Path, files: list[Path], cwd: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", str(installed)]
    command += [f"--cache-dir={TYPES}", *map(str, files)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_typed_programs_are_checked_strictly(installed: Path, tmp_path: Path) -> None:
    programs = {"revealed": revealed(rankscope), "plugin": revealed(api)}
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "plugin_of_docs.py").write_text(PLUGIN_OF_DOCS)
    files = [*PROGRAMS, *(tmp_path / f"{name}.py" for name in (*programs, "plugin_of_docs"))]
    told = check_types(installed, files, tmp_path)
    lines = [line for line in told.splitlines() if "Revealed type" in line]
    asked = [line for text in programs.values() for line in text.splitlines() if "reveal_type(" in line]
    assert len(lines) == len(asked)
    untyped = []
    for line in lines:
        name, number, told_type = re.findall(r'(\w+)\.py:(\d+): note: Revealed type is "(.*)"', line)[0]
        _, arrow, returned = told_type.rpartition(") -> ")
        if told_type.startswith("def ") and not arrow:
            continue  # it returns nothing
        for of_numpy in ("tuple[Any, ...], numpy.dtype", "numpy.generic[Any]"):  # an array's any shape, any scalar
            returned = returned.replace(of_numpy, "numpy")
        question = programs[name].splitlines()[int(number) - 1]
        if re.search(r"\bAny\b", returned) and not question.rstrip(")").endswith(NOT_INSTALLED):
            untyped.append(f"{question} {line}")
    assert untyped == []
    assert any("analyzers.finding.Finding" in line for line in lines)


@pytest.mark.slow
def test_typed_programs_run_as_the_docs_say(installed: Path, tmp_path: Path) -> None:
    slow = make_run(tmp_path, slow={2: 1.5}).path
    good = make_run(tmp_path).path
    (tmp_path / "job.log").write_text("[rank2]: RuntimeError: CUDA error: an illegal memory access was encountered\n")

    def program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(installed), str(ROOT / "examples" / "api" / f"{name}.py"), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)

    gate = program("ci_gate", str(slow), str(good))
    assert gate.returncode == 1, gate.stdout + gate.stderr
    assert "time per token" in gate.stdout or "per token (95 %" in gate.stdout
    assert program("slow_ranks", str(slow)).stdout.startswith("rank 2: ")
    assert "ank 2" in program("dead_job", "job.log").stdout
    hints = "import rankscope, typing\nfrom rankscope import api\nfor one in (api.Run.compare, api.Run.diagnose, "
    hints += "api.Run.account, api.Finding, api.Comparison, api.open):\n    typing.get_type_hints(one)\n"
    done = subprocess.run(
        [str(installed), "-c", hints + "print(dir(rankscope))"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "open_run" in done.stdout
