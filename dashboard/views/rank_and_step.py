"""Part of the page of ranks: the rank and step that the address names, `?rank=3&step=60`."""

from __future__ import annotations

from typing import Any

import streamlit as st

from analyzers.source import Source
from dashboard.data.rank_at_step import rank_at_step
from dashboard.drawing.elements import empty_state, table
from dashboard.finding_link import page_link
from dashboard.frame import View

__all__ = ["rank_and_step"]


def load_rank_at_step(source: Source, rank: int, step: int) -> dict[str, Any]:
    """Account, calls and events."""
    return rank_at_step(source, rank, step)


def rank_and_step(view: View) -> None:
    """Draw the account of one rank in one step, its calls and its events; without an address, how to choose one."""
    rank, step = _number("rank"), _number("step")
    if rank is None or step is None:
        st.caption("Click a cell to see that rank in that step: its account, its calls, its events.")
        return
    with st.container(border=True, key="rank-and-step"):
        with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
            st.subheader(f"Rank {rank} in step {step:,}", anchor=False, width="content")
            with st.container(horizontal=True, gap="small", width="content"):
                _buttons(view, rank, step)
        found = view.ask(load_rank_at_step, rank, step)
        if found is not None:
            _draw(found)


def _buttons(view: View, rank: int, step: int) -> None:
    of_step: dict[str, dict[str, str | list[str]]] = {
        "Timeline": {"timeline-last": str(step), "timeline-num": "1"},
        "Logs": {"log-rank": str(rank), "log-step": str(step)},
        "Events": {"event-step": f"{max(1, step - 1)}-{step + 1}"},
    }
    icons = {"Timeline": "view_timeline", "Logs": "article", "Events": "event_note"}
    for title, address in of_step.items():
        page_link(title, title, icons[title], {"run": view.run_id} | address, key=f"to-{title.lower()}")
    if st.button("Close", key="close-rank-and-step", icon=":material/close:", type="tertiary"):
        del st.query_params["rank"], st.query_params["step"]
        st.rerun()


def _draw(found: dict[str, Any]) -> None:
    if found["attempt"] is None:
        empty_state("This rank has no such step.", "It may have ended before, or the step has not begun.")
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
        peers = f"the median of the {found['num_peers']} other ranks of its pipeline stage"
        st.caption(f"Own work by phase and gap, milliseconds, attempt {found['attempt']}. Peers: {peers}.")
    with right:
        if found["calls"]:
            table(found["calls"], key="rank-calls", height=300)
        else:
            st.caption("No collective of this rank was recorded in this step.")
        if found["events"]:
            table(found["events"], key="rank-events")
        else:
            st.caption("Neither the rank nor a node reported an event in this step.")


def _ms(value: float | None) -> float | None:
    return None if value is None else round(float(value), 3)


def _number(name: str) -> int | None:
    text = st.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
