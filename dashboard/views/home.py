"""First page: table of all runs with tags and notes, from which runs are opened or compared."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import streamlit as st

from dashboard.data.background_answers import Answers
from dashboard.drawing import units
from dashboard.drawing.elements import empty_state, markdown_text
from dashboard.frame import IDLE_S, POLL_S, access_to, runs_folder
from dashboard.page_link import page_link
from dashboard.views.compare import MAX_RUNS
from probes.tape.redaction.printable import visible
from probes.tape.rundir import RunDir, RunError
from store.runs.run_notes import RunNotes, read_notes
from store.runs_folder import RunsFolder

__all__ = ["home"]

MAX_SUMMARIES = 100
"""Number of matching runs, newest first, of which the records are read. Older runs are listed by name only."""
MAX_PROBLEMS = 3
MAX_WHOLE = 20
"""Rows that the table shows without a scroll bar."""
_HIDDEN = ["name", "problem", "pending", "is_live", "last_ns", "is_settled"]
_WIDTHS = {"state": 90, "severity": 75, "step": 65, "step time": 80, "tokens/s": 70, "loss": 65}
"""Widths of columns in pixels: the browser would fit them to the first cells, which are empty while runs are being
read.
"""
MAX_CACHED = 2_000
"""Number of ended runs for which the table's cells are cached."""
_SHOWN_NAME = "(?:run=|#)([^#]*)$"
"""Part of the link that the table displays, decoded."""


def home() -> None:
    """Draw the table, and update it while it is open."""
    st.title("Runs", anchor=False)
    polls = st.session_state.get("home_polls", True)

    def draw() -> None:
        is_pending = _table()
        if is_pending != polls:
            st.session_state["home_polls"] = is_pending
            st.rerun()

    st.fragment(draw, run_every=POLL_S if polls else IDLE_S, key="home")()


def _table() -> bool:
    """Draw filter, buttons and table; return True if more will follow soon."""
    folder = runs_folder()
    names = folder.run_ids()
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        text = st.text_input(
            "Filter",
            key="filter",
            placeholder="part of a name, state, finding, tag or note",
            bind="query-params",
            width=640,  # on a narrow screen, the buttons beside this field move below it
            help="All words must occur. `tag:baseline` matches runs with exactly that tag.",
        )
        buttons = st.container(horizontal=True, gap="small", width="content")
    words = text.lower().split()
    rows: list[dict[str, Any]] = []
    is_pending = False
    for name in names:
        row = _row(folder, name, is_read=len(rows) < MAX_SUMMARIES)
        is_pending |= row["pending"] or row["is_live"]
        if _matches(row, words):
            rows.append(row)
    if not rows:
        empty_state("No run matches the filter.")
        return is_pending
    frame = pd.DataFrame([row | {"run": _address(row["name"])} for row in rows]).drop(columns=_HIDDEN)
    frame = frame.drop(columns=[name for name in ("tags", "note") if not any(row[name] for row in rows)])
    # The caption is not directly above the table, because the table's toolbar would cover it on hovering.
    st.caption(
        f"A run's name opens it in a new tab. Select one run to open it here, or two to {MAX_RUNS} to compare them. A "
        "live run shows what watch has reported, an ended run its diagnosis, which is computed in the background. "
        "Tags and notes: `rankscope note RUN --tag baseline --text '...'`."
    )
    # The selection consists of row numbers, so it is only valid for the same rows.
    rows_hash = hash(tuple(row["name"] for row in rows))
    chosen = st.dataframe(
        frame, hide_index=True, key=f"runs-table-{rows_hash}", on_select="rerun",
        height="content" if len(rows) <= MAX_WHOLE else 800, selection_mode="multi-row",
        column_config={
            **{name: st.column_config.Column(width=width) for name, width in _WIDTHS.items()},
            "losses": st.column_config.LineChartColumn("loss curve", width=80),
            "run": st.column_config.LinkColumn("run", width=212, pinned=True, alignment="left",
                                               display_text=_SHOWN_NAME),
            "finding": st.column_config.TextColumn("worst finding", width=120),
            "age": st.column_config.TextColumn("last record", width=115),
            "tags": st.column_config.ListColumn("tags"),
        },
    )  # fmt: skip
    _actions(buttons, [rows[index]["name"] for index in chosen["selection"]["rows"] if index < len(rows)])
    if len(rows) > MAX_SUMMARIES:
        st.caption(
            f"The newest {MAX_SUMMARIES:,} of these {len(rows):,} matching runs are read. Filter to reach older ones."
        )
    for row in [row for row in rows if row["problem"]][:MAX_PROBLEMS]:
        st.caption(markdown_text(f"{row['run']}: {row['problem']}", 400))
    return is_pending


def _address(name: str) -> str:
    """Address of a run's Overview, relative to this page. If the name contains unprintable characters, the printable
    form is appended.
    """
    shown = visible(name)
    address = f"overview?run={quote(name, safe='')}"
    return address if shown == name else f"{address}#{quote(shown, safe='')}"


def _matches(row: dict[str, Any], words: list[str]) -> bool:
    """Return True if all words occur in the row's text. `tag:x` must match a whole tag."""
    tags = {tag.lower() for tag in row["tags"]}
    text = f"{row['run']} {row['state']} {row['finding']} {' '.join(tags)} {row['note']}".lower()
    return all(word[4:] in tags if word.startswith("tag:") and len(word) > 4 else word in text for word in words)


def _actions(container: Any, selected: list[str]) -> None:
    with container:
        opens, compares = len(selected) == 1, 2 <= len(selected) <= MAX_RUNS
        address = {"run": selected[0] if opens else ""}
        page_link("Overview", "Open", "open_in_new", address, key="open-run", is_disabled=not opens)
        newest, *others = sorted(selected, key=runs_folder().run_ids().index) if compares else ("",)
        compared: dict[str, str | list[str]] = {"run": newest, "with": others}
        page_link("Compare runs", "Compare", "compare_arrows", compared, key="compare-runs", is_disabled=not compares)


@st.cache_resource(show_spinner=False)
def _summaries() -> Answers:
    """Run summaries, shared by all visitors. Computed one at a time, so that opening a run does not wait for them."""
    return Answers(threads=1)


@st.cache_resource(show_spinner=False)
def _judgements() -> Answers:
    """Diagnoses of ended runs, shared by all visitors. Computed one at a time in the background."""
    return Answers(threads=1)


@st.cache_resource(show_spinner=False)
def _ended() -> dict[Path, tuple[Hashable, dict[str, Any]]]:
    """Cached cells of ended runs, shared by all visitors, with the folder's stamp when they were read."""
    return {}


def _stamp(path: Path) -> Hashable:
    """Value that changes with any file directly in a run's folder, and with each new attempt."""
    with os.scandir(path) as entries:
        found = [
            (entry.name, entry.stat(follow_symlinks=False))
            for entry in entries
            if not entry.name.endswith(".lock")  # readers create lock files, so these do not show that the run changed
        ]
    return tuple(sorted((name, status.st_mtime_ns, status.st_size) for name, status in found))


def _row(folder: RunsFolder, name: str, *, is_read: bool) -> dict[str, Any]:
    """A run's cells. Those of an ended run are read again only if its folder has changed."""
    path = folder.path / name
    cached = _ended()
    try:
        stamp = _stamp(path) if is_read else None
    except OSError:
        stamp = None
    former = cached.get(path)
    if former is not None and stamp is not None and former[0] == stamp:
        row = former[1]
    else:
        row = _read_row(path, is_read=is_read)
        if stamp is not None and row["is_settled"] and (path in cached or len(cached) < MAX_CACHED):
            cached[path] = (stamp, row)
    last_ns = row["last_ns"]
    return row | {"age": f"{units.age(time.time() - last_ns / 1e9)} ago" if last_ns else ""}


def _read_row(path: Path, *, is_read: bool) -> dict[str, Any]:
    """Read a run's cells. Cells that are not known yet are empty."""
    name = path.name
    found: dict[str, Any] = {}
    notes = RunNotes()
    pending, problem, is_settled = False, "", False
    if is_read:
        try:
            run = RunDir.open(path)
            notes = read_notes(run)
            answer = access_to(run).summary(_summaries())
            found, problem = answer.value or {}, "" if answer.error is None else str(answer.error)
            pending = not found and not problem
            is_settled = answer.is_fresh and not found.get("is_live")
            if found and not found["is_live"]:  # a live run needs no diagnosis here: `watch` reports its findings
                judged = access_to(run).worst_finding(_judgements())
                is_awaited = not judged.is_fresh and judged.error is None
                unjudged = {} if found["finding"] else {"finding": "analyzing…" if is_awaited else "not analyzed"}
                found = found | (judged.value or unjudged)
                pending |= is_awaited
                is_settled &= judged.is_fresh
        except RunError as error:
            problem = str(error)
    if problem and not found:
        found = {"state": "cannot be read"}
    loss = found.get("loss")
    # An empty cell of an unread run would look like a run without findings.
    unread = "" if found else "reading…" if pending else "not read" if not is_read else ""
    more = f" +{found['num_findings'] - 1}" if found.get("num_findings", 0) > 1 else ""
    step_ms = found.get("step_ms")
    return {
        "name": name, "run": visible(name), "finding": f"{found['finding']}{more}" if found.get("finding") else unread,
        "state": found.get("state", unread),
        "severity": found.get("severity", ""),
        "step": "" if found.get("step") is None else str(found["step"]),
        "step time": units.duration(step_ms / 1e3) if step_ms is not None else "",
        "tokens/s": units.amount(found["tokens_per_s"]) if found.get("tokens_per_s") else "",
        "loss": "" if loss is None else f"{loss:.4f}" if math.isfinite(loss) else "not finite",
        "losses": found.get("losses") or [],
        "age": "",
        "tags": [visible(tag) for tag in notes.tags], "note": visible(notes.text),
        "problem": problem, "pending": pending, "is_live": bool(found.get("is_live")),
        "last_ns": found.get("last_ns"), "is_settled": is_settled,
    }  # fmt: skip
