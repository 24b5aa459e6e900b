"""Nothing is recorded that no part of the product shows."""

from __future__ import annotations

import ast

from analyzers.report import where_shown
from analyzers.report.where_shown import shown, shown_event, surface_of
from probes.tape.event_kinds import EVENT_KINDS
from probes.tape.format.schema import TABLES, Column
from store.ddl import store_columns

_BY_SQL = {
    "ranks": {"clock_offset_ns": "epoch minus monotonic time, to compare times with other logs"},
    "nccl_calls": {
        "nccl_seq": "number of the call in NCCL's own log", "root": "of broadcast and reduce",
        "channels_stopped": "state of a call in flight",
    },
    "nccl_communicators": {"comm_rank": "key", "event_mask": "asked for by the plugin", "created_ns": "key"},
    "nccl_groups": {"created_ns": "key"},
    "nccl_channels": {"start_ns": "by the host's clock"},
    "nccl_links": {"start_ns": "begin of the window", "progress_ns": "state of an operation in flight",
                   "op_num_steps": "state of an operation in flight"},
}  # fmt: skip
"""Columns for users' SQL only, and their purpose: keys, and details of what is shown."""
_EVENTS_PAGE = ("peer_copy", "verdict_refused", "records_retired", "budget_exceeded")
"""Measured event kinds about the telemetry itself, which only the events page shows."""


def _not_shown() -> list[str]:
    """Columns that no surface shows, and measured event kinds that only the events page shows."""
    columns = [
        f"{table.name}.{column.name}"
        for table in TABLES.values()
        for column in store_columns(table)
        if not shown(table.name, column.name) and column.name not in _BY_SQL.get(table.name, {})
    ]
    measured = [
        name for name, kind in EVENT_KINDS.items() if any(map(_is_measured, kind.fields)) and name not in _EVENTS_PAGE
    ]
    return columns + [name for name in measured if not shown_event(name)]


def _is_measured(column: Column) -> bool:
    """Return True for a duration, size or share, which is worth plotting, unlike counts, names and times."""
    return column.unit in ("s", "By", "nats") or column.name.endswith(("_s", "_ms", "_bytes", "_ratio"))


def test_nothing_is_recorded_and_shown_nowhere() -> None:
    assert _not_shown() == []


def test_each_exception_is_an_existing_column_that_nothing_shows() -> None:
    for table, columns in _BY_SQL.items():
        assert columns.keys() <= {column.name for column in store_columns(TABLES[table])}
        assert not [name for name in columns if shown(table, name)], table
    assert not [kind for kind in _EVENTS_PAGE if shown_event(kind)]


def test_evaluations_are_shown_where_a_reader_looks() -> None:
    assert {"exporters", "reports"} <= set(shown_event("evaluation"))
    assert "goodput" in shown("steps", "forward_wait_ns")
    assert shown("collective_totals", "calls") == ["pages"]  # its SQL is in dashboard/data


def test_composed_names_count_where_their_parts_stand() -> None:
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


def test_the_surface_of_a_module() -> None:
    assert surface_of("dashboard/views/ranks.py") == "pages"
    assert surface_of("dashboard/views/sql.py") == ""
    assert surface_of("rankscope/commands/collect_evidence.py") == "reports"
    assert surface_of("analyzers/stragglers/analyze.py") == "findings"
    assert surface_of("analyzers/robust.py") == ""
