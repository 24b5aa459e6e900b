"""Nothing is recorded that no part of the product shows."""

from __future__ import annotations

import ast

from analyzers.report import where_shown
from analyzers.report.where_shown import not_shown, place_of, shown, shown_event
from probes.tape.format.schema import TABLES
from store.ddl import store_columns


def test_nothing_is_recorded_and_shown_nowhere() -> None:
    assert not_shown() == []


def test_exceptions_are_columns_that_there_are_and_that_nothing_shows() -> None:
    for table, columns in where_shown._BY_SQL.items():
        assert columns.keys() <= {column.name for column in store_columns(TABLES[table])}
        assert not [name for name in columns if shown(table, name)], table
    assert not [kind for kind in where_shown._EVENTS_PAGE if shown_event(kind)]


def test_evaluations_are_shown_where_a_reader_looks() -> None:
    assert {"exporters", "reports"} <= set(shown_event("evaluation"))
    assert "goodput" in shown("steps", "forward_wait_ns")
    assert shown("collective_totals", "calls") == ["pages"]  # its SQL is in dashboard/data


def test_names_that_are_put_together_count_where_their_parts_stand() -> None:
    code = 'f"SELECT {phase}_wait_ns FROM steps"\nnames = ("sync", "backward")'
    module = where_shown._module(ast.parse(code), "x")
    assert module.names("sync_wait_ns")
    assert module.names("backward_wait_ns")
    assert not module.names("weight_wait_ns")
    assert not module.names("sync_late_ns")


def test_a_docstring_shows_nothing() -> None:
    module = where_shown._module(ast.parse('"""Reads steps."""\nrows = ask("SELECT rank FROM ranks")'), "x")
    assert module.names("ranks")
    assert not module.names("steps")


def test_the_place_of_a_module() -> None:
    assert place_of("dashboard/views/ranks.py") == "pages"
    assert place_of("dashboard/views/sql.py") == ""
    assert place_of("rankscope/commands/collect_evidence.py") == "reports"
    assert place_of("analyzers/stragglers/analyze.py") == "findings"
    assert place_of("analyzers/robust.py") == ""
