"""Any question in SQL: a console that only reads, the tables beside it, and examples to start from."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from analyzers.report.text import visible
from probes.schema import TABLES
from probes.store import StoreError

from .. import units
from ..frame import View, framed
from ..show import table

__all__ = ["sql"]

MAX_ROWS = 1_000
LIMIT_S = 20.0
MEMORY_BYTES = 1 << 30
EXAMPLES = {
    "Median step time by rank": "SELECT rank, round(median(duration_ns) / 1e6, 2) AS step_ms,\n"
    "       round(median(collective_wait_ns) / 1e6, 2) AS waiting_ms\nFROM steps GROUP BY rank ORDER BY rank",
    "Slowest collectives": "SELECT op, process_group, bytes, count(*) AS calls,\n"
    "       round(max(end_ns - issue_ns) / 1e6, 2) AS longest_ms, any_value(caller) AS caller\n"
    "FROM collectives WHERE end_ns IS NOT NULL GROUP BY ALL ORDER BY longest_ms DESC LIMIT 20",
    "What is in flight": "SELECT rank, op, process_group, seq, caller\n"
    "FROM collectives WHERE end_ns IS NULL ORDER BY rank",
    "Events, the newest first": "SELECT to_timestamp(wall_ns / 1e9) AS at_time, attempt, rank, kind, step, detail\n"
    "FROM events ORDER BY wall_ns DESC LIMIT 100",
    "Findings as they were said": "SELECT to_timestamp(wall_ns / 1e9) AS at_time, severity, finding_kind, summary\n"
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
    """The question, its answer, and what there is to ask."""
    view.is_pending = False
    left, right = st.columns([3, 2], gap="large")
    with left:
        st.session_state.setdefault("sql-text", next(iter(EXAMPLES.values())))
        st.selectbox(
            "Example", list(EXAMPLES), index=None, key="sql-example", placeholder="start from an example",
            on_change=_use_example,
        )  # fmt: skip
        text = st.text_area("Question", key="sql-text", height=170, label_visibility="collapsed")
        asked = st.button("Ask", type="primary", icon=":material/play_arrow:", key="sql-ask")
        if asked or st.session_state.get("sql-run") != view.run_id:
            st.session_state["sql-answer"], st.session_state["sql-run"] = _answer(view, text), view.run_id
        _show(st.session_state.get("sql-answer"))
    with right:
        _schema()


def _answer(view: View, text: str) -> dict[str, Any]:
    try:
        with view.access.open(memory_bytes=MEMORY_BYTES) as store:
            found = store.typed(text, max_rows=MAX_ROWS, limit_s=LIMIT_S)
    except StoreError as error:
        return {"error": str(error)}
    rows = [[_plain(value) for value in row] for row in found.rows]
    return {"names": found.names, "rows": rows, "is_cut": found.is_cut, "took_s": found.took_s}


def _plain(value: Any) -> Any:
    """A cell that a table can hold; text as it is, without control signs."""
    if isinstance(value, str):
        return visible(value[:2_000])
    return value if value is None or isinstance(value, (bool, int, float)) else visible(str(value)[:2_000])


def _show(answer: dict[str, Any] | None) -> None:
    if answer is None:
        return
    if "error" in answer:
        st.code(visible(answer["error"]), language=None, wrap_lines=True)
        return
    names = _distinct(answer["names"])
    frame = pd.DataFrame(answer["rows"], columns=names)
    st.dataframe(frame, hide_index=True, key="sql-table", height="content" if len(frame) <= 14 else 500)
    cut = f", the first {MAX_ROWS:,} are shown" if answer["is_cut"] else ""
    st.caption(f"{len(frame):,} rows in {units.duration(answer['took_s'])}{cut}")


def _distinct(names: tuple[str, ...]) -> list[str]:
    """A table needs a name of its own for each column."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(visible(name)[:80] if seen[name] == 1 else f"{visible(name)[:80]} ({seen[name]})")
    return found


def _schema() -> None:
    st.subheader("Tables", anchor=False)
    st.caption("Times are nanoseconds since 1970; NULL is what was not recorded. Nothing here can be changed.")
    name = st.selectbox("Table", list(TABLES), key="sql-schema", label_visibility="collapsed")
    described = TABLES[name]
    st.text(described.help)
    common = [("attempt", "", "life of the worker group, from 0"), ("rank", "", "-1: a node process")]
    rows = common + [(column.name, column.unit, column.help) for column in described.columns]
    table(
        {"column": [row[0] for row in rows], "unit": [row[1] for row in rows], "meaning": [row[2] for row in rows]},
        key=f"schema-{name}", height=480,
    )  # fmt: skip
