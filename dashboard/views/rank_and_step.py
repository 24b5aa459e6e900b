"""Part of the page on ranks: the rank and step in the address, `?rank=3&step=60`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from analyzers.hangs.stacks import read_stack
from analyzers.source import Source
from dashboard.data.rank_at_step import rank_at_step
from dashboard.data.run_logs import RunLogs, lines_at
from dashboard.drawing.elements import empty_state, markdown_text, table
from dashboard.frame import View
from dashboard.page_link import page_link
from dashboard.views.logs import load_logs
from probes.tape.redaction.printable import visible
from store.published.copy_time import is_copy

__all__ = ["rank_and_step"]

MAX_LINES = 16
"""Maximum log lines, so that the content below stays visible; the Logs page has all lines."""
MAX_CALLS, CALLS_HEIGHT = 7, 300
"""A table of at most `MAX_CALLS` calls is shown whole; a longer one scrolls in `CALLS_HEIGHT` pixels."""


def load_rank_at_step(source: Source, rank: int, step: int) -> dict[str, Any]:
    """Load time account, calls and events."""
    return rank_at_step(source, rank, step)


def load_stack(source: Source, stacks_dir: str, rank: int, step: int) -> tuple[int, list[str]]:
    """Return the newest attempt with this step that has a stack of the rank, and its frames, innermost first.

    A step that hung is repeated in the next attempt, where no stack is taken. Without a stack the frames are empty.
    """
    sql = "SELECT DISTINCT attempt FROM steps WHERE rank = ? AND step = ? ORDER BY attempt DESC"
    attempts = [int(attempt) for (attempt,) in source.rows(sql, [rank, step])]
    found = ((attempt, read_stack(Path(stacks_dir), attempt, rank)) for attempt in attempts)
    return next(((attempt, frames) for attempt, frames in found if frames), (max(attempts, default=0), []))


def rank_and_step(view: View, *, has_cells: bool) -> None:
    """Draw the time account, calls, events, log lines and stack of one rank in one step. If none is selected, say how
    to select one, if there are cells to click.
    """
    rank, step = _number("rank"), _number("step")
    if rank is None or step is None:
        if has_cells:
            st.caption("Click a cell to see that rank in that step: its account, calls, events, log lines and stack.")
        return
    with st.container(border=True, key="rank-and-step"):
        with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
            st.subheader(f"Rank {rank} in step {step}", anchor=False, width="content")
            with st.container(horizontal=True, vertical_alignment="center", gap="small", width="content"):
                _buttons(view, rank, step)
        found = view.ask(load_rank_at_step, rank, step)
        if found is not None:
            _draw(found)
            if found["attempt"] is not None:
                _draw_texts(view, rank, step, found["attempt"])


def _buttons(view: View, rank: int, step: int) -> None:
    addresses: dict[str, dict[str, str | list[str]]] = {
        "Timeline": {"timeline-last": str(step), "timeline-num": "1"},
        "Logs": {"log-rank": str(rank), "log-step": str(step)},
        "Events": {"event-step": f"{max(1, step - 1)}-{step + 1}"},
        "Health": {},
    }
    icons = {"Timeline": "view_timeline", "Logs": "article", "Events": "event_note", "Health": "device_thermostat"}
    for title, address in addresses.items():
        page_link(title, title, icons[title], {"run": view.run_id} | address, key=f"to-{title.lower()}")
    if st.button("Close", key="close-rank-and-step", icon=":material/close:", type="tertiary"):
        del st.query_params["rank"], st.query_params["step"]
        st.rerun()


def _draw(found: dict[str, Any]) -> None:
    if found["attempt"] is None:
        empty_state("This rank has no such step.", "The rank may have ended before, or the step has not begun.")
        return
    with st.container(key="rank-columns"):
        left, right = st.columns([2, 3], gap="medium")
    with left:
        account = found["account"]
        table(
            {
                "account": list(account), "this rank": [_ms(own) for own, _ in account.values()],
                "peers": [_ms(peers) for _, peers in account.values()],
                "more": [None if None in pair else _ms(pair[0] - pair[1]) for pair in account.values()],
            }, key="rank-account",
        )  # fmt: skip
        num = found["num_peers"]
        peers = f"the median of the {num} other ranks of its pipeline stage"
        peers = "the other rank of its pipeline stage" if num == 1 else peers if num else "none in its stage"
        st.caption(f"Own work by phase and gap, milliseconds, attempt {found['attempt']}. Peers: {peers}.")
        if found["place"] is not None:
            host, device = found["place"]
            st.caption(f"It ran on the device {markdown_text(device, 60)} of the host {markdown_text(host, 80)}.")
    with right:
        if found["calls"]:
            table(found["calls"], key="rank-calls", height=CALLS_HEIGHT if len(found["calls"]) > MAX_CALLS else None)
        else:
            st.caption("No collective of this rank was recorded in this step.")
        if found["events"]:
            table(found["events"], key="rank-events")
        else:
            st.caption("Neither the rank nor a node reported an event in this step.")


def _draw_texts(view: View, rank: int, step: int, attempt: int) -> None:
    """Draw what the rank printed in the step, and its newest stack."""
    if is_copy(view.access.run):
        st.caption("Log lines and stacks are not published: they are in the run's folder on its nodes.")
        return
    logs: RunLogs | None = view.ask(load_logs, str(view.access.run.path))
    if logs is not None:
        lines = lines_at(logs.lines, rank=rank, step=step, attempt=attempt)
        if lines:
            st.code("\n".join(visible(line.text) for line in lines[-MAX_LINES:]), language=None)
            cut = f"The last {MAX_LINES} of {len(lines):,} lines" if len(lines) > MAX_LINES else "Lines"
            more = " The page Logs has all lines." if len(lines) > MAX_LINES else ""
            st.caption(f"{cut} that the rank printed in this step.{more}")
        else:
            st.caption("No log line is known to belong to this rank and step.")
    stack: tuple[int, list[str]] | None = view.ask(load_stack, str(view.access.run.stacks), rank, step)
    if stack is None:
        return
    taken_in, frames = stack
    if frames:
        st.code("\n".join(visible(frame) for frame in frames), language=None)
        st.caption(
            f"The newest stack of the rank in attempt {taken_in}, innermost frame first. It may have been taken in "
            "another step."
        )
    else:
        st.caption(f"No stack of the rank was taken in attempt {attempt}: stacks are taken when ranks stall.")


def _ms(value: float | None) -> float | None:
    return None if value is None else round(float(value), 3)


def _number(name: str) -> int | None:
    text = st.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
