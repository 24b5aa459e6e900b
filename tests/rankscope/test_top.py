"""`rankscope top`: which ranks come first, what the table says of them, and how many it folds."""

from __future__ import annotations

import re
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from analyzers.finding import Finding
from analyzers.report.rank_rows import RankRows, rank_rows
from analyzers.report.terminal.rank_table import Heading, rank_table
from rankscope.cli import app
from store import Store
from tests.factories import make_run


def drawn(found: RankRows, *, max_rows: int, width: int = 140) -> str:
    console = Console(width=width, no_color=True, record=True, file=StringIO())
    console.print(rank_table(found, Heading(run="runs/x", state="training"), max_rows=max_rows))
    return console.export_text()


def test_the_rank_that_hangs_comes_first(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=30, hang={2: 20})
    hang = Finding(
        kind="hang",
        severity="critical",
        status="fired",
        analyzer="hangs",
        ranks=(2,),
        attempt=0,
        summary="Rank 2 hangs.",
    )
    with Store.open(run) as store:
        found = rank_rows(store, [hang], now_ns=time.time_ns())
    assert found.rows[0].rank == 2
    assert found.rows[0].finding == "hang"
    others = found.rows[1:]
    assert all("all_reduce" in row.doing for row in others), [row.doing for row in others]
    assert "all_reduce" not in found.rows[0].doing
    assert found.rows[0].own_ms is not None
    assert found.rows[0].own_ms > 0
    text = drawn(found, max_rows=10)
    assert re.search(r"^ *2 +running", text, flags=re.MULTILINE), text


def test_ranks_that_do_not_fit_are_folded(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=16, steps=5)
    with Store.open(run) as store:
        found = rank_rows(store, [], now_ns=time.time_ns())
    text = drawn(found, max_rows=5)
    assert "12 more" in text
    assert "ranks 4-15" in text, text
    assert len([line for line in text.splitlines() if re.match(r" *\d+ +(running|ended)", line)]) == 4


def test_it_prints_once_into_a_pipe(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=30, slow={3: 1.5}, phase="forward")
    done = CliRunner().invoke(app, ["top", str(run.path)])
    assert done.exit_code == 0, done.output
    assert "4 ranks" in done.output
    assert "step 30" in done.output


@pytest.mark.parametrize("markup", ["[red]x[/red]", "\x1b[31mred"])
def test_text_of_the_run_has_no_effect(tmp_path: Path, markup: str) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    with Store.open(run) as store:
        found = rank_rows(store, [], now_ns=time.time_ns())
    console = Console(width=100, no_color=True, record=True, file=StringIO())
    console.print(rank_table(found, Heading(run=markup, state="training"), max_rows=4))
    text = console.export_text()
    assert "red" in text
    assert "\x1b" not in text
