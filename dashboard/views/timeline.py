"""Page with the timeline: phases and collectives of chosen steps and ranks, and calls in flight."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import Any

import streamlit as st

from analyzers.figures.time import activity
from analyzers.figures.time import timeline as gantt
from analyzers.figures.time.attempt_marks import AttemptMark, attempt_marks
from analyzers.figures.time.moment import MAX_RANKS
from analyzers.report.chrome_trace.write import write_trace
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, take_snapshot
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from dashboard.data.sql import queries
from dashboard.drawing.elements import chart, empty_state, table
from dashboard.frame import View, framed
from probes.tape.redaction.printable import visible

__all__ = ["timeline"]

MAX_TRACE_STEPS = 200


def load_items(source: Source, attempt: int, first: int, last: int, ranks: tuple[int, ...]) -> Any:
    """Load spans and calls."""
    return activity.timeline(source, attempt=attempt, first_step=first, last_step=last, ranks=ranks)


def load_marks(source: Source, attempt: int) -> list[AttemptMark]:
    """Load the start and end of the attempt, and its rollbacks."""
    return attempt_marks(source, attempt)


def load_in_flight(source: Source, attempt: int) -> list[dict[str, Any]]:
    """Load the calls that never ended, and each rank's activity, at the end of the attempt's records."""
    view = take_snapshot(source, attempt, EventLog.load(source, SNAPSHOT_EVENTS))
    rows = []
    for rank in sorted(view.ranks):
        state = view.ranks[rank]
        calls = state.calls or (None,)
        rows += [
            {
                "rank": rank, "step": state.step, "doing": state.doing, "process": state.state,
                "in flight": call.text if call else "", "bytes": call.num_bytes if call else None,
                "shape": call.shape if call else "", "caller": call.caller if call else "",
                "started before the last record (s)":
                    round((view.last_ns - call.issue_ns) / 1e9, 3) if call and call.issue_ns else None,
            }
            for call in calls
        ]  # fmt: skip
    return rows


@framed("Timeline")
def timeline(view: View) -> None:
    """Draw the chosen steps and ranks, by default the newest steps."""
    extent = view.ask(queries.extent)
    if extent is None:
        return
    if not extent["last"] or not extent["ranks"]:
        empty_state("No step was recorded.")
        return
    attempt, first, last, ranks, is_chosen = _chosen(extent)
    find = st.text_input(
        "Find", key="timeline-find", placeholder="all_gather, blocks.3, step 60, ...", max_chars=100,
        bind="query-params", help="Entries without these words are faint.",
    )  # fmt: skip
    items = view.ask(load_items, attempt, first, last, tuple(ranks))
    if items is None:
        return
    if items:
        chart(
            gantt.draw, items, view.ask(load_marks, attempt) or [], ranks=sorted(ranks), find=find or "",
            key="timeline", what="Phases and collectives of the ranks",
            selected=(attempt, first if is_chosen else "newest", last - first, *sorted(ranks)),
        )  # fmt: skip
        stages = {item.stage for item in items if item.stage is not None}
        flows = "Lines follow microbatches from stage to stage. " if len(stages) > 1 else ""
        hatched = "Diagonal hatching: never ended. " if any(p.end_ms is None for p in items) else ""
        found = (
            f"{sum(gantt.matches(item, find) for item in items):,} of {len(items):,} entries match. " if find else ""
        )
        st.caption(f"{found}Top: phases. Bottom, striped: collectives and transfers. {hatched}{flows}Drag to zoom.")
        if len(items) >= activity.MAX_ITEMS:
            st.caption(f"Only the first {activity.MAX_ITEMS:,} entries are shown: choose fewer steps or ranks.")
    else:
        empty_state("Neither spans nor collectives were recorded in these steps.")
    _in_flight(view, attempt)
    _download(view, attempt, first, last, ranks)


def _chosen(extent: dict[str, Any]) -> tuple[int, int, int, list[int], bool]:
    """Attempt, first and last step, ranks, and True if the user chose the steps."""
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        attempts = sorted(extent["last"], reverse=True)
        attempt = attempts[0]
        if len(attempts) > 1:
            attempt = st.selectbox("Attempt", attempts, key="timeline-attempt", width=110, bind="query-params")
        newest = extent["last"][attempt]
        asked = st.number_input(
            "Last step", min_value=0, value=None, step=1, key="timeline-last", width=190, bind="query-params",
            placeholder=f"newest ({newest})",
        )  # fmt: skip
        num = st.number_input(
            "Steps", min_value=1, max_value=50, value=3, step=1, key="timeline-num", width=120, bind="query-params"
        )
        ranks = st.multiselect(
            "Ranks", extent["ranks"], default=extent["ranks"][:8], key="timeline-ranks", max_selections=MAX_RANKS,
            bind="query-params",
        )  # fmt: skip
    last = newest if asked is None else min(int(asked), newest)
    return attempt, max(0, last - int(num) + 1), last, list(ranks) or extent["ranks"][:1], asked is not None


def _in_flight(view: View, attempt: int) -> None:
    rows = view.ask(load_in_flight, attempt)
    if not rows or not any(row["in flight"] for row in rows):
        return
    is_now = view.state.is_live and attempt == view.state.attempt
    st.subheader("In flight now" if is_now else "In flight when the records end", anchor=False)
    table(rows, key="in-flight")


def _download(view: View, attempt: int, first: int, last: int, ranks: list[int]) -> None:
    first = max(first, last - MAX_TRACE_STEPS + 1)

    def packed() -> bytes:
        with tempfile.TemporaryDirectory(prefix="rankscope-") as folder, view.access.open() as store:
            path = Path(folder) / "trace.json"
            write_trace(store, path, steps=(first, last), attempt=attempt, ranks=ranks)
            return gzip.compress(path.read_bytes(), 5)

    st.download_button(
        f"Chrome trace of steps {first} to {last}", packed,
        file_name=f"{visible(view.run_id)[:80]}-{attempt}-{first}-{last}.json.gz",
        mime="application/gzip", icon=":material/download:", on_click="ignore", key="trace",
        help="Only these ranks. For all steps: rankscope export RUN --to chrome-trace --out trace.json.gz",
    )  # fmt: skip
    st.caption(
        "To view it, download the trace and drop it onto a Perfetto UI: your own copy, or `ui.perfetto.dev`, which "
        "reads it in the browser. The dashboard does not send it anywhere."
    )
