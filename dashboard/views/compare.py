"""Page to compare two runs: speed, loss, settings, findings."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st
from plotly.graph_objects import Figure

from analyzers.figures import series
from analyzers.figures.theme import SEQUENCE
from analyzers.printable import visible
from analyzers.report.terminal.compare_text import sentence, tables
from analyzers.source import floats, ints
from dashboard.drawing.elements import chart, empty_state, markdown_text, table, unique_names
from dashboard.frame import View, access_to, framed, runs_folder
from probes.tape.rundir import RunError

__all__ = ["compare"]


@framed("Compare runs")
def compare(view: View) -> None:
    """Compare the selected run with another one of the folder."""
    names = runs_folder().run_ids()
    others = [name for name in names if name != view.run_id]
    if not others:
        empty_state("There is only one run in this folder.", "Train another run to compare it with this one.")
        return
    place = names.index(view.run_id) if view.run_id in names else -1
    former = min(max(place, 0), len(others) - 1)  # the run before this one
    name = st.selectbox(
        "Baseline", others, index=former, key="baseline", format_func=visible, width=420, bind="query-params"
    )
    try:
        other = access_to(runs_folder().open(name))
    except RunError as error:
        empty_state("The other run cannot be read.")
        st.text(visible(str(error)[:500]))
        return
    answer = view.access.compared_with(other)
    if answer.value is None:
        if answer.error is not None:
            empty_state("The two runs cannot be compared.")
            st.text(visible(str(answer.error)[:500]))
            view.is_pending = True
        else:
            empty_state("Comparing both runs…")
            view.expect(answer)
        return
    if answer.error is not None:
        empty_state("The two runs cannot be compared now. The last comparison is shown.")
        st.text(visible(str(answer.error)[:500]))
    if not answer.is_fresh:
        view.is_pending = True
        if answer.error is None:
            st.caption("A newer comparison is being computed.")
    comparison = answer.value["comparison"]
    headings = unique_names(("", name, view.run_id))
    st.markdown(f"**{markdown_text(sentence(comparison), 500)}**")
    _losses(view.run_id, name, answer.value)
    for heading, rows in tables(comparison):
        if rows:
            st.subheader(heading, anchor=False)
            table(
                dict(zip(headings, ([row[place] for row in rows] for place in range(3)), strict=True)),
                key=f"compare-{heading}",
            )  # fmt: skip


def _losses(run_b: str, run_a: str, found: dict[str, Any]) -> None:
    if any(np.asarray(found[side]["kept"], dtype=bool).any() for side in ("loss_a", "loss_b")):
        chart(_loss_figure, run_b, run_a, found, key=f"compare-loss-{run_a}", what="Loss of both runs over the steps")
    else:
        empty_state("Neither run has recorded a loss.")


def _loss_figure(run_b: str, run_a: str, found: dict[str, Any]) -> Figure:
    lines = []
    for name, curve, colour in ((run_a, found["loss_a"], SEQUENCE[7]), (run_b, found["loss_b"], SEQUENCE[0])):
        kept = np.asarray(curve["kept"], dtype=bool)
        if kept.any():
            lines.append(
                series.Series(name=name, x=ints(curve["step"])[kept], y=floats(curve["loss"])[kept], colour=colour)
            )
    return series.draw(lines, x="step", y="loss (nat)", height=340)
