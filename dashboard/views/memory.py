"""Page on memory: over the steps, by rank, and its growth."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from analyzers.figures import numbers
from analyzers.figures.ranks import heatmap, rank_step
from analyzers.source import Source, floats
from dashboard.data.sql import queries
from dashboard.drawing.elements import chart, empty_state, table
from dashboard.frame import View, framed

__all__ = ["memory"]


def load_memory(source: Source) -> dict[str, Any]:
    """Load curves over the ranks, values by rank, and the matrix rank x step."""
    return {
        "curve": queries.memory_curve(source), "ranks": queries.memory_by_rank(source),
        "matrix": rank_step.rank_step(source, "memory"),
    }  # fmt: skip


@framed("Memory")
def memory(view: View) -> None:
    """Draw memory over all ranks, by rank and step, and by rank."""
    data = view.ask(load_memory)
    if data is None:
        return
    curve = data["curve"]
    if not len(curve["step"]):
        empty_state("No memory was recorded.")
        return
    chart(numbers.memory, curve, key="memory-curve", what="Minimum, median and maximum memory of the ranks")
    st.caption("Memory of each rank's process, or of its device if it has one, at the end of the step.")
    st.subheader("Rank and step", anchor=False)
    chart(heatmap.draw, data["matrix"], key="memory-matrix", what="Memory by rank and step")
    st.subheader("By rank", anchor=False)
    ranks = data["ranks"]
    first, largest, last = (floats(ranks[name]) for name in ("first_mib", "largest_mib", "last_mib"))
    table(
        {
            "rank": ranks["rank"], "largest (MiB)": np.round(largest, 1), "growth (MiB)": np.round(last - first, 1),
            "first step (MiB)": np.round(first, 1), "last step (MiB)": np.round(last, 1),
        }, key="memory-table",
    )  # fmt: skip
