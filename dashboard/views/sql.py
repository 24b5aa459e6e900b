"""Page with a read-only SQL console, the tables, and examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.drawing import units
from dashboard.drawing.elements import table, unique_names
from dashboard.frame import View, framed
from probes.tape.format.schema import TABLES
from probes.tape.redaction.printable import visible
from store import StoreError
from store.sql import process as sql_process

__all__ = ["sql"]

MAX_ROWS = 1_000
LIMIT_S = 20.0
EXACT = 1 << 53
"""Largest integer that a browser represents exactly; larger ones are shown as text."""
EXAMPLES = {
    "Median step time by rank": "SELECT rank, round(median(duration_ns) / 1e6, 2) AS step_ms,\n"
    "       round(median(collective_wait_ns) / 1e6, 2) AS waiting_ms\nFROM steps GROUP BY rank ORDER BY rank",
    "Slowest collectives": "SELECT op, process_group, bytes, count(*) AS calls,\n"
    "       round(max(end_ns - issue_ns) / 1e6, 2) AS longest_ms, any_value(caller) AS caller\n"
    "FROM collectives WHERE end_ns IS NOT NULL GROUP BY ALL ORDER BY longest_ms DESC LIMIT 20",
    "What is in flight": "SELECT rank, op, process_group, seq, caller\n"
    "FROM collectives WHERE end_ns IS NULL ORDER BY rank",
    "Events, the newest first": "SELECT make_timestamp(wall_ns // 1000) AS at_utc, attempt, rank, kind, step, detail\n"
    "FROM events ORDER BY wall_ns DESC LIMIT 100",
    "Findings as reported": "SELECT make_timestamp(wall_ns // 1000) AS at_utc, severity, finding_kind, summary\n"
    "FROM findings ORDER BY wall_ns",
    "Loss by step": "SELECT step, any_value(loss) AS loss, any_value(grad_norm) AS grad_norm\n"
    "FROM steps WHERE loss IS NOT NULL GROUP BY step ORDER BY step DESC LIMIT 200",
    "Time by kind of span": "SELECT rank, kind, count(*) AS spans, round(sum(end_ns - start_ns) / 1e9, 2) AS seconds\n"
    "FROM spans WHERE end_ns IS NOT NULL GROUP BY ALL ORDER BY rank, seconds DESC",
}


def _use_example() -> None:
    name = st.session_state.get("sql-example")
    if name in EXAMPLES:
        st.session_state["sql-text"] = EXAMPLES[name]


@framed("SQL")
def sql(view: View) -> None:
    """Draw the query, its result, and the tables."""
    view.is_pending = False
    sql_process.warm_up()
    left, right = st.columns([3, 2], gap="large")
    with left:
        st.selectbox(
            "Example", list(EXAMPLES), index=None, key="sql-example", placeholder="Start from an example",
            on_change=_use_example,
        )  # fmt: skip
        first = next(iter(EXAMPLES.values()))
        text = st.text_area(
            "Query", first, key="sql-text", height=170, label_visibility="collapsed", bind="query-params"
        )
        asked = st.button("Run", type="primary", icon=":material/play_arrow:", key="sql-ask")
        if asked or (st.session_state.get("sql-run") != view.run_id and text == first):
            st.session_state["sql-answer"], st.session_state["sql-run"] = _answer(view, text), view.run_id
        if st.session_state.get("sql-run") == view.run_id:
            _show(st.session_state.get("sql-answer"))
        else:  # a link must not make a visitor run another person's query
            st.caption("The query in this link has not been run yet: press Run.")
    with right:
        _schema()


def _answer(view: View, text: str) -> dict[str, Any]:
    try:
        found = view.access.ask_sql(text, max_rows=MAX_ROWS, limit_s=LIMIT_S)
        columns = list(zip(*found.rows, strict=True)) or [()] * len(found.names)
        names = unique_names(found.names)
        frame = pd.DataFrame({name: _column(values) for name, values in zip(names, columns, strict=True)})
    except (StoreError, ValueError, OverflowError) as error:  # OverflowError: a value outside Python's range
        return {"error": str(error)}
    return {"frame": frame, "is_cut": found.is_cut, "took_s": found.took_s}


def _column(values: Sequence[Any]) -> pd.Series[Any]:
    """Convert a column so that a browser shows it exactly, with control characters made visible."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int} and all(abs(value) <= EXACT for value in values if value is not None):
        return pd.Series(values, dtype="Int64")
    if kinds in ({bool}, {float}):
        return pd.Series(values, dtype="boolean" if kinds == {bool} else "float64")
    shown = [None if value is None else visible(str(value)[:2_000]) for value in values]
    return pd.Series(shown, dtype="object")


def _show(answer: dict[str, Any] | None) -> None:
    if answer is None:
        return
    if "error" in answer:
        st.code("\n".join(map(visible, answer["error"].splitlines())), language=None, wrap_lines=True)
        return
    frame = answer["frame"]
    st.dataframe(frame, hide_index=True, key="sql-table", height="content" if len(frame) <= 14 else 500)
    cut = f" (limited to {MAX_ROWS:,})" if answer["is_cut"] else ""
    st.caption(f"{len(frame):,} row{'s' * (len(frame) != 1)} in {units.duration(answer['took_s'])}{cut}")


def _schema() -> None:
    st.subheader("Tables", anchor=False)
    st.caption("Times are nanoseconds since 1970. NULL means not recorded. The console is read-only.")
    name = st.selectbox("Table", list(TABLES), key="sql-schema", label_visibility="collapsed", bind="query-params")
    described = TABLES[name]
    st.text(described.help)
    common = [("attempt", "", "number of the worker group's launch, from 0"), ("rank", "", "-1: a node process")]
    rows = common + [
        (column.name, "" if column.unit == "1" else column.unit, column.help) for column in described.columns
    ]
    table(
        {"column": [row[0] for row in rows], "unit": [row[1] for row in rows], "meaning": [row[2] for row in rows]},
        key=f"schema-{name}", height=480, column_config={"column": st.column_config.TextColumn(width="medium")},
    )  # fmt: skip
