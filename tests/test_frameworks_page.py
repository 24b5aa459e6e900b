"""docs/frameworks.md: no row without its version, what it costs, what was found, and a command whose files exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.accuracy.frameworks import SCRIPTS
from tests.trials.e2e.test_frameworks_run import FRAMEWORKS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
COLUMNS = ("framework", "version", "where it ran", "overhead", "faults named", "mesh", "command")
ROWS = [
    dict(zip(COLUMNS, (cell.strip() for cell in line.strip().strip("|").split("|")), strict=False))
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| framework")
]
_COMMAND = re.compile(r"`([^`]*\b(?:python|pytest|rankscope)\b[^`]*)`")
_FILE = re.compile(r"[\w/]+\.py\b")
WANTED = (
    "torchtitan", "DeepSpeed", "Megatron-core", "Ray Train", "GRPO", "torchft", "torchtune", "FSDP", "Lightning",
    "Fabric", "Accelerate", "pipelining",
)  # fmt: skip


def test_the_table_has_its_columns() -> None:
    assert "| " + " | ".join(COLUMNS) + " |" in PAGE


@pytest.mark.parametrize("name", WANTED)
def test_each_framework_has_a_row(name: str) -> None:
    assert [row for row in ROWS if name.lower() in row["framework"].lower()]


@pytest.mark.parametrize("row", ROWS, ids=[row["framework"] for row in ROWS])
def test_a_row_is_whole_and_its_command_can_be_given(row: dict[str, str]) -> None:
    assert set(row) == set(COLUMNS)
    assert all(row.values()), row
    commands = _COMMAND.findall(row["command"])
    assert commands, "no row without its command"
    for path in (path for command in commands for path in _FILE.findall(command)):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("row", ROWS, ids=[row["framework"] for row in ROWS])
def test_the_version_is_the_one_that_the_tests_run(row: dict[str, str]) -> None:
    """Only of packages that are installed for the tests."""
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    ours = [re.split(r"[><=\[]", line)[0] for name in ("hf", "lightning") for line in extras[name]]
    for package in ours:
        if row["framework"].lower().startswith(package):
            assert pins[package] in row["version"]


def test_scripts_of_the_tests_and_the_benchmark_exist() -> None:
    assert all(Path(framework.words[0]).is_file() for framework in FRAMEWORKS.values())
    assert all(script.path.is_file() for script in SCRIPTS.values())
