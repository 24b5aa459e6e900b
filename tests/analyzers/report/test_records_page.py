"""docs/records.md is what the source says, and nothing is recorded that no part of the product shows."""

from __future__ import annotations

import ast
from pathlib import Path

from analyzers.report import records_page
from analyzers.report.records_page import markdown, not_shown, place_of, shown, shown_event
from probes.tape.event_kinds import EVENT_KINDS
from probes.tape.schema import TABLES
from store.ddl import store_columns

PAGE = Path(__file__).resolve().parents[3] / "docs" / "records.md"


def test_the_page_is_what_the_source_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "python -m analyzers.report.records_page > docs/records.md"


def test_nothing_is_recorded_and_shown_nowhere() -> None:
    assert not_shown() == []


def test_no_row_of_the_page_is_empty() -> None:
    text = markdown()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))
    assert all(f"`{kind}`" in text for kind in EVENT_KINDS)
    assert all(f"`{column.name}`" in text for table in TABLES.values() for column in store_columns(table))


def test_exceptions_are_columns_that_there_are_and_that_nothing_shows() -> None:
    for table, columns in records_page._BY_SQL.items():
        assert columns.keys() <= {column.name for column in store_columns(TABLES[table])}
        assert not [name for name in columns if shown(table, name)], table
    assert not [kind for kind in records_page._TOLD_ONLY if shown_event(kind)]


def test_evaluations_are_shown_where_a_reader_looks() -> None:
    assert {"metrics", "figures", "report"} <= set(shown_event("evaluation"))
    assert "account" in shown("steps", "forward_wait_ns")
    assert "page collectives" not in shown("collective_totals", "calls")  # its SQL is in dashboard/data
    assert "pages" in shown("collective_totals", "calls")


def test_names_that_are_put_together_count_where_their_parts_stand() -> None:
    code = 'f"SELECT {phase}_wait_ns FROM steps"\nnames = ("sync", "backward")'
    module = records_page._module(ast.parse(code), "x")
    assert module.names("sync_wait_ns")
    assert module.names("backward_wait_ns")
    assert not module.names("weight_wait_ns")
    assert not module.names("sync_late_ns")


def test_a_docstring_shows_nothing() -> None:
    module = records_page._module(ast.parse('"""Reads steps."""\nrows = ask("SELECT rank FROM ranks")'), "x")
    assert module.names("ranks")
    assert not module.names("steps")


def test_the_place_of_a_module() -> None:
    assert place_of("dashboard/views/ranks.py") == "page ranks"
    assert place_of("rankscope/commands/collect_evidence.py") == "`collect-evidence`"
    assert place_of("analyzers/stragglers/analyze.py") == "findings (stragglers)"
    assert place_of("analyzers/robust.py") == ""
