"""Page on ranks: heatmap of ranks and steps, slowest ranks, the mesh, and two ranks side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st
from plotly.graph_objects import Figure

from analyzers.figures import numbers
from analyzers.figures.ranks import excess_map, heatmap, mesh, rank_step, straggler
from analyzers.figures.ranks.excess import Excess, load_excess
from analyzers.source import Source, floats, ints
from analyzers.wording import counted
from dashboard.data.run_access import LARGE_BYTES
from dashboard.data.sql import queries
from dashboard.drawing.elements import chart, empty_state, table
from dashboard.frame import View, framed
from dashboard.views.rank_and_step import rank_and_step

__all__ = ["ranks"]

PREVIEW_ROWS = 5_000_000
EXCESS = "over peers"
_COLUMNS = {
    "rank": "rank", "own_ms": "own work (ms)", "step_ms": "step time (ms)", "waiting_ms": "waiting (ms)",
    "memory_mib": "memory, largest (MiB)",
}  # fmt: skip


def load_matrix(source: Source, measure: str, is_excess: bool) -> Any:
    """Load the matrix of ranks and steps, as recorded or as excess over the median of the peers."""
    return _matrix_of(source, measure, is_excess, None)


def load_preview(source: Source, measure: str, is_excess: bool) -> Any:
    """Load a preview from a few million rows, shown until all have been read."""
    return _matrix_of(source, measure, is_excess, PREVIEW_ROWS)


def _matrix_of(source: Source, measure: str, is_excess: bool, max_rows: int | None) -> rank_step.Matrix | Excess:
    if is_excess:
        return load_excess(source, measure, max_rows=max_rows)
    return rank_step.rank_step(source, measure, max_rows=max_rows)


def load_ranks(source: Source) -> dict[str, Any]:
    """Load the medians of each rank, its phases, and its coordinates in the mesh."""
    return {
        "ranking": queries.ranking(source, 0, 1 << 60),
        "work": rank_step.own_work(source),
        "places": mesh.load_places(source),
    }


def load_pair(source: Source, a: int, b: int, measure: str) -> Any:
    """Load one measure of two ranks over the steps."""
    return queries.two_ranks(source, a, b, measure)


@framed("Ranks")
def ranks(view: View) -> None:
    """Draw the heatmap with the selected rank and step, then the ranking, the mesh, and two ranks."""
    measure, is_excess = _measure()
    matrix = _matrix(view, measure, is_excess)
    if matrix is None:
        return
    has_cells = bool(matrix.values.size and np.isfinite(matrix.values).any())
    if has_cells:
        diagnosis = view.diagnosis()
        marks = heatmap.marks_of(diagnosis.fired if diagnosis is not None else ())
        clicked = chart(
            excess_map.draw if is_excess else heatmap.draw, matrix, key="ranks-heatmap",
            what=f"{measure} by rank and step", marks=marks, clickable=True, selected=(measure, is_excess),
        )  # fmt: skip
        if clicked is not None:
            st.query_params.update({"rank": str(int(clicked["y"])), "step": str(int(clicked["x"]))})
        caption = _caption(matrix)
        if caption:
            st.caption(caption)
    elif is_excess and matrix.values.size:
        empty_state(f"No rank has a peer to compare {measure} with.", "Choose `as recorded`.")
    else:
        empty_state(f"No {measure} was recorded in this run.")
    rank_and_step(view, has_cells=has_cells)
    data = view.ask(load_ranks)
    if data is None:
        return
    culprits = _straggler_ranks(view)
    left, right = st.columns(2, gap="medium")
    with left:
        st.subheader("Slowest first", anchor=False)
        if len(data["work"]["rank"]):
            chart(straggler.ranking, data["work"], culprits, key="ranks-ranking", what="Own work of each rank by phase")
        else:
            empty_state("No step has ended.")
    with right:
        st.subheader("In the mesh", anchor=False)
        _mesh(data)
    _pair(view, ints(data["ranking"]["rank"]).tolist(), measure)
    with st.expander("All ranks as a table"):
        table(
            {_COLUMNS[name]: np.round(column, 2) for name, column in data["ranking"].items()}, key="ranks-table",
        )  # fmt: skip


def _caption(matrix: Any) -> str:
    """Caption that says how cells aggregate ranks and steps."""
    parts = []
    if isinstance(matrix, Excess):
        largest = int(matrix.members.max(initial=1))
        if largest > 1:
            parts.append(f"A row is the mean of up to {counted(largest, 'rank')}, or the one that stands out.")
        if matrix.steps_per_cell > 1:
            parts.append(f"A cell is the mean of {counted(matrix.steps_per_cell, 'step')}.")
        if matrix.noise > 0:
            parts.append(f"Noise of a cell: {matrix.noise:.2g} {matrix.unit}; colours begin at twice that.")
    elif matrix.is_reduced:
        parts.append(
            f"A cell is the largest value of {counted(matrix.ranks_per_cell, 'rank')} and "
            f"{counted(matrix.steps_per_cell, 'step')}."
        )
    if matrix.every_steps > 1:
        parts.append(f"So far 1 step in {matrix.every_steps} has been read.")
    return " ".join(parts)


def _measure() -> tuple[str, bool]:
    """Let the user choose the measure, and whether it is shown as excess over peers."""
    with st.container(horizontal=True, gap="medium"):
        measure = st.segmented_control(
            "Measure", list(rank_step.MEASURES), default="own work", key="measure", required=True, bind="query-params",
            help="Own work is the time in which a rank computes and loads data without waiting for others, so a slow "
            "rank stands out. "
            "Step time is about the same on all ranks, because they wait for one another.",
        )  # fmt: skip
        scale = st.segmented_control(
            "Shown", [EXCESS, "as recorded"], default=EXCESS, key="scale", required=True, bind="query-params",
            help="Over peers: compared with the median of the ranks of the same pipeline stage in the same step.",
        )  # fmt: skip
    return measure or "own work", scale != "as recorded"


def _matrix(view: View, measure: str, is_excess: bool) -> Any:
    """The matrix, or for a large run a preview until the matrix is computed."""
    if view.access.size_bytes() < LARGE_BYTES:
        return view.ask(load_matrix, measure, is_excess)
    whole = view.access.ask(load_matrix, measure, is_excess, first_s=0.0)
    if whole.value is not None:
        view.is_pending |= not whole.is_fresh
        return whole.value
    view.expect(whole)
    return view.ask(load_preview, measure, is_excess)


def _straggler_ranks(view: View) -> list[int]:
    """Ranks of open straggler findings."""
    diagnosis = view.diagnosis()
    fired = diagnosis.fired if diagnosis is not None else ()
    return sorted({rank for finding in fired if finding.kind == "straggler" for rank in finding.ranks})


def _mesh(data: dict[str, Any]) -> None:
    places, ranking = data["places"], data["ranking"]
    sizes = {name: len(np.unique(places[name])) for name in mesh.DIMENSIONS if len(places[name])}
    found = [name for name, size in sizes.items() if size > 1]
    if len(ranking["rank"]) == 1:
        empty_state("There is only one rank.")
        return
    if not found:
        empty_state("All ranks have the same coordinates in the mesh, or they were not recorded.")
        return
    host_dimensions = ("local_rank", "node_rank")  # sorted to the end: parallel dimensions explain more than the host
    found.sort(key=lambda name: (name in host_dimensions, -sizes[name]))
    shown = st.columns(2)
    columns = shown[0].selectbox(
        "Across", found, key="mesh-across", bind="query-params", format_func=lambda name: mesh.DIMENSIONS[name]
    )
    others = [name for name in mesh.DIMENSIONS if name != columns]
    filled = {name: mesh.filled_ratio(places, name, columns) for name in others}
    # The rows are the dimension with which most cells are filled. In a mesh of one or two dimensions, the node is
    # preferred.
    others.sort(
        key=lambda name: (
            name == "local_rank", -filled[name], name != "node_rank" or len(found) > 2, -sizes.get(name, 0),
        )
    )  # fmt: skip
    rows = shown[1].selectbox(
        "Down", others, key="mesh-down", bind="query-params", format_func=lambda name: mesh.DIMENSIONS[name]
    )
    chart(
        _mesh_figure, places, ranking, rows=rows, columns=columns, key=f"mesh-{rows}-{columns}",
        what="Own work of the ranks by mesh coordinates",
    )  # fmt: skip
    st.caption(
        "The number in a cell, where there is room, is a rank, the slowest if a cell has several. The colour is its "
        "median own work per step."
    )


def _pair(view: View, ranking: list[int], measure: str) -> None:
    """Draw a measure of two ranks, by default of the slowest and the fastest. `ranking`: slowest first."""
    if len(ranking) < 2:
        return
    st.subheader("Two ranks", anchor=False)
    with st.container(horizontal=True, gap="small"):
        ordered = sorted(ranking)
        a, b = (
            st.selectbox(name, ordered, index=ordered.index(rank), key=key, width=140, bind="query-params")
            for name, rank, key in (("Rank", ranking[0], "pair-a"), ("Other rank", ranking[-1], "pair-b"))
        )
    pair = view.ask(load_pair, a, b, measure)
    if pair is None:
        return
    chart(
        numbers.two_ranks, pair, a, b, measure, rank_step.MEASURES[measure][1], key="pair", selected=(a, b, measure),
        what=f"{measure} of rank {a} and rank {b} over the steps",
    )  # fmt: skip


def _mesh_figure(places: queries.Columns, ranking: queries.Columns, *, rows: str, columns: str) -> Figure:
    own = dict(zip(ints(ranking["rank"]).tolist(), floats(ranking["own_ms"]).tolist(), strict=True))
    values = np.array([own.get(rank, np.nan) for rank in ints(places["rank"]).tolist()])
    return mesh.draw(places, values, rows=rows, columns=columns, unit="ms")
