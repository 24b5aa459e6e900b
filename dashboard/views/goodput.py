"""Page on goodput: how the wall time of the run and of each rank was spent."""

from __future__ import annotations

import streamlit as st

from analyzers.account.goodput import CATEGORIES, CONTRADICTED
from analyzers.figures.time import goodput as figures
from dashboard.drawing import units
from dashboard.drawing.elements import chart, empty_state, table, tiles
from dashboard.frame import View, framed

__all__ = ["GOODPUT", "goodput"]

GOODPUT = "Share of wall time spent on training steps that were kept."


@framed("Goodput")
def goodput(view: View) -> None:
    """Draw how the time of the whole run was spent."""
    diagnosis = view.diagnosis()
    if diagnosis is None:
        empty_state("Computing the account…", "It reads every step of every rank once.")
        return
    account = diagnosis.goodput
    if account is None or account.wall_s <= 0:
        empty_state("No step was recorded.")
        return
    tiles(
        [
            ("Goodput", units.percent(account.goodput_ratio), None, GOODPUT),
            ("Wall time", units.duration(account.wall_s), None, None),
            ("Steps kept", str(account.num_kept), None, None),
            ("Steps discarded", str(account.num_discarded), None, "Ended steps: refused, rolled back or lost."),
        ], key="goodput",
    )  # fmt: skip
    chart(figures.waterfall, account, key="waterfall", what="Wall time by category, down to training")
    if account.contradicted:
        st.warning(CONTRADICTED.format(why=account.contradicted))
    if account.open_text:
        st.caption(account.open_text)
    if account.basis == "steps":
        st.caption("No collectives were recorded, so waits are attributed per step, which is less precise.")
    if len(account.by_rank) > 1:
        st.subheader("By rank", anchor=False)
        chart(figures.by_rank, account, key="goodput-ranks", what="Seconds of each rank by category")
    with st.expander("As a table"):
        names = [name for name in CATEGORIES if account.seconds[name] > 0]
        table(
            {
                "category": [account.names[name] for name in names],
                "seconds, mean over the ranks": [round(account.seconds[name], 3) for name in names],
                "share (%)": [round(100 * account.seconds[name] / account.wall_s, 2) for name in names],
            }, key="goodput-table",
        )  # fmt: skip
