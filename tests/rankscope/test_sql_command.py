"""`rankscope sql`: rows as text, CSV and JSON; only reading, within limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rankscope.cli import app
from tests.factories import make_run


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sql"), ranks=2, steps=5).path


def sql(run: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["sql", str(run), *arguments])


def test_rows_in_three_formats(run_path: Path) -> None:
    query = "SELECT rank, count(*) AS steps FROM steps GROUP BY rank ORDER BY rank"
    assert json.loads(sql(run_path, query, "--format", "json").output) == [
        {"rank": 0, "steps": 5},
        {"rank": 1, "steps": 5},
    ]
    assert sql(run_path, query, "--format", "csv").output.split() == ["rank,steps", "0,5", "1,5"]
    text = sql(run_path, query).output
    assert [line.split() for line in text.splitlines() if line.strip()][-1] == ["1", "5"]


def test_the_tables_are_listed_with_their_rows(run_path: Path) -> None:
    lines = [line.split() for line in sql(run_path, "--tables").output.splitlines()]
    assert ["steps", "10"] in lines


def test_rows_that_are_left_out_are_named(run_path: Path) -> None:
    done = sql(run_path, "FROM steps", "--max-rows", "3", "--format", "csv")
    assert len(done.stdout.splitlines()) == 4
    assert "only the first 3 rows" in done.stderr


@pytest.mark.parametrize(
    "statement",
    ["COPY steps TO 'x.csv'", "INSTALL httpfs", "SET memory_limit = '1TB'", "FROM read_text('/etc/passwd')"],
)
def test_sql_reaches_nothing_outside_the_store(run_path: Path, statement: str, tmp_path: Path) -> None:
    done = sql(run_path, statement)
    assert done.exit_code == 2
    assert "root:" not in done.output


def test_a_statement_over_its_limits_is_one_line(run_path: Path) -> None:
    done = sql(run_path, "SELECT range(2000000000)")
    assert (done.exit_code, "Out of Memory" in done.stderr) == (2, True)
    assert done.stderr.strip().endswith("query fewer steps or ranks")
    assert "SET " not in done.stderr, "settings are locked"
    done = sql(run_path, "SELECT count(*) FROM range(1000000) a, range(1000000) b", "--limit-s", "0.2")
    assert (done.exit_code, "longer than 0.2 s" in done.stderr) == (2, True)


def test_control_characters_and_markup_have_no_effect(run_path: Path) -> None:
    done = sql(run_path, "SELECT chr(27) || '[31m' AS a, '[bold]x[/bold]' AS b")
    assert "\x1b" not in done.output
    assert "[bold]x[/bold]" in done.output


def test_a_row_that_is_wider_than_the_terminal_is_printed_as_lines(run_path: Path) -> None:
    done = sql(run_path, "FROM steps ORDER BY rank, step LIMIT 2")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line for line in lines if line[0] in ("row", "rank", "step", "loss")][:4] == [
        ["row", "1"], ["rank", "0"], ["step", "1"], ["loss", lines[[line[0] for line in lines].index("loss")][1]],
    ]  # fmt: skip
    assert ["row", "2"] in lines
    assert len(sql(run_path, "FROM steps WHERE rank = 0").stdout.splitlines()) % 5 == 0


def test_a_long_text_stays_in_the_table(run_path: Path) -> None:
    text = sql(run_path, "SELECT 1 AS a, repeat('x', 300) AS b").stdout
    assert "row 1" not in text
    assert text.count("x") == 300
