"""Page on events: the history of a run, filtered by kind, rank and step."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import streamlit as st

from analyzers.run.records.event_log import parsed_detail
from analyzers.source import Source
from analyzers.wording import counted as number_of
from dashboard.data.sql import event_queries
from dashboard.data.sql.step_range import Ranges, numbers
from dashboard.drawing.elements import empty_state, markdown_text, table
from dashboard.frame import View, framed
from probes.tape.event_kinds import EVENT_KINDS
from probes.tape.redaction.printable import visible

__all__ = ["events"]

MAX_CODE_CHARS = 40_000


def load_kinds(source: Source) -> list[dict[str, Any]]:
    """Counts by kind."""
    return event_queries.kinds(source)


def load_events(source: Source, kinds: tuple[str, ...], ranks: Ranges, steps: Ranges, text: str) -> dict[str, Any]:
    """Matching events."""
    return event_queries.events(source, kinds, ranks, steps, text)


@framed("Events")
def events(view: View) -> None:
    """Draw the filter, the newest matching events, the selected event in full, and what the kinds mean."""
    counted = view.ask(load_kinds)
    if counted is None:
        return
    if not counted:
        empty_state("No event was recorded in this run.", "Events are lines of `events.jsonl` next to the tapes.")
        return
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        chosen = st.multiselect(
            "Kind", [row["kind"] for row in counted], key="event-kind", placeholder="all but routine ones", width=360,
            format_func=visible, bind="query-params",
        )  # fmt: skip
        rank_text = st.text_input(
            "Rank", key="event-rank", placeholder="any; -1: a node", width=150, bind="query-params"
        )
        step_text = st.text_input("Step", key="event-step", placeholder="any: 60-70", width=150, bind="query-params")
        text = st.text_input("Text", key="event-text", placeholder="part of an event", width=220, bind="query-params")
    ranks, steps = numbers(rank_text or ""), numbers(step_text or "")
    if ranks is None or steps is None:
        empty_state("Ranks and steps are numbers and ranges.", "For example `3`, `0-7` or `3, 12-15`.")
    else:
        found = view.ask(load_events, tuple(chosen), ranks, steps, (text or "")[:200])
        if found is not None:
            _draw(found, is_all=not chosen)
    with st.expander("Kinds of events in this run"):
        table([row | _meaning(row["kind"]) for row in counted], key="event-kinds")


def _draw(found: dict[str, Any], *, is_all: bool) -> None:
    rows = found["rows"]
    if not rows:
        empty_state("No event matches the filter.", _routine(is_all))
        return
    chosen = table(
        {
            "time (UTC)": [_time(row["wall_ns"]) for row in rows],
            "kind": [row["kind"] for row in rows],
            "step": [row["step"] for row in rows],
            "from": ["node" if row["rank"] < 0 else f"rank {row['rank']}" for row in rows],
            "attempt": [row["attempt"] for row in rows],
            "fields": [event_queries.event_text(row["detail"]) for row in rows],
        },
        key="events-table", on_select="rerun", selection_mode="single-row",
        column_config={"fields": st.column_config.TextColumn("fields", width="large")},
    )  # fmt: skip
    newest = f"The newest {len(rows):,} of " if found["num"] > len(rows) else ""
    shown = f"{newest}{number_of(found['num'], 'event')}"
    st.caption(f"{shown}, the newest first. Select one to read it in full. {_routine(is_all)}")
    selected = [index for index in chosen["selection"]["rows"] if index < len(rows)]
    if selected:
        _in_full(rows[selected[0]])


def _in_full(row: dict[str, Any]) -> None:
    with st.container(border=True, key="event-in-full"):
        st.markdown(f"**{markdown_text(row['kind'], 100)}**")
        if meaning := _meaning(row["kind"])["meaning"]:
            st.caption(markdown_text(meaning))
        fields = parsed_detail(row["detail"])
        lines = json.dumps(fields, indent=2, ensure_ascii=False) if fields else row["detail"] or ""
        st.code("\n".join(map(visible, lines[:MAX_CODE_CHARS].splitlines())), language=None, wrap_lines=True)


def _routine(is_all: bool) -> str:
    if not is_all:
        return ""
    return f"Left out unless chosen: {', '.join(f'`{kind}`' for kind in event_queries.ROUTINE)}."


def _meaning(kind: str) -> dict[str, str]:
    known = EVENT_KINDS.get(kind)
    if known is None:
        return {"meaning": "a kind defined by the script", "written by": "rank"}
    return {"meaning": known.meaning, "written by": known.written_by}


def _time(wall_ns: int | None) -> str:
    return "" if wall_ns is None else datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%m-%d %H:%M:%S.%f")[:-3]
