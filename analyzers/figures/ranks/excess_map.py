"""Heatmap of ranks over steps, coloured by their excess over their peers; noise has the background colour.

    figure = draw(excess_over_peers(cells, places), marks=[Mark(rank=3, first_step=60, ...)])

The colour scale is logarithmic from twice the noise of a cell up to the largest row. So a rank at +1 % is visible if
nothing is worse, and a rank at +30 % does not hide another at +3 %. Ranks that stand out, and ranks of findings, are
named above the map; if there are many ranks, their rows are also repeated there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from analyzers.figures.drawing.theme import label, new_figure
from analyzers.figures.ranks.excess import Excess, StandingOut
from analyzers.figures.ranks.heatmap import MARK, Mark
from analyzers.figures.ranks.mesh import DIMENSIONS
from analyzers.source import Floats

__all__ = ["draw", "name_of"]

LABELLED_ROWS = 32
"""Up to this number of rows, each row is tall enough for a label."""
MAX_ABOVE = 6
GROUND_SIGMAS, TOP_SIGMAS = 2.0, 6.0
"""Ends of the logarithmic part of the colour scale, in units of noise. A larger excess moves the upper end up."""
GROUND = 0.2
"""Share of the colour scale for an excess below `GROUND_SIGMAS`."""
ROW_PX, GAP_PX = 26, 14
MAP_PX = 520
TICKS = (1, 2, 3, 5)
TICK_GAP_RATIO = 0.15
"""Minimum distance of two labels / length of the colour bar: one line of text if the map has four ranks."""
TEXT_PX = 20
"""Height of a line of text above the map."""


def draw(excess: Excess, *, marks: Sequence[Mark] = ()) -> go.Figure:
    """Ranks from top to bottom in the order of the mesh, steps from left to right."""
    rows = len(excess.ranks)
    is_labelled = rows <= LABELLED_ROWS
    low, top = _limits(excess)
    above = [] if is_labelled else _above(excess, marks)
    map_px = ROW_PX * max(rows, 4) if is_labelled else MAP_PX
    above_px = ROW_PX * len(above) + (GAP_PX if above else 0)
    height = map_px + above_px + 100
    share = map_px / (map_px + above_px)
    figure = new_figure(height=height, x="step", y="rank")
    names = [
        f"rank {rank}" if number == 1 else f"ranks from {rank} on, mean of {number}"
        for rank, number in zip(excess.ranks.tolist(), excess.members.tolist(), strict=True)
    ]
    figure.add_trace(_cells(excess, excess.values, names, excess.ranks.tolist(), low, top))
    figure.update_traces(showscale=True, colorbar=_colour_bar(excess, low, top))
    half = 0.5 * excess.steps_per_cell
    figure.update_xaxes(showgrid=False, range=[int(excess.steps[0]) - half, int(excess.steps[-1]) + half])
    ticks, texts = _ticks(excess, is_labelled)
    figure.update_yaxes(
        type="category", autorange="reversed", showgrid=False, tickmode="array", domain=[0, share],
        tickvals=[names[row] for row in ticks], ticktext=texts,
    )  # fmt: skip
    if above:
        above_names = [f"rank {rank}" for rank in above]
        trace = _cells(excess, np.stack([_row(excess, rank) for rank in above]), above_names, above, low, top)
        trace.update(yaxis="y2", showscale=False)
        figure.add_trace(trace)
        figure.update_layout(
            yaxis2={
                "domain": [1 - ROW_PX * len(above) / (map_px + above_px), 1], "autorange": "reversed", "anchor": "x",
                "type": "category", "showgrid": False, "fixedrange": True, "ticks": "",
            }
        )  # fmt: skip
    shapes: list[dict[str, Any]] = []
    for name, _, row in excess.groups[1:]:
        if name != "node_rank" or not is_labelled:
            between = {"x0": 0, "x1": 1, "xref": "x domain", "y0": row - 0.5, "y1": row - 0.5}
            shapes.append({"type": "line", **between, "line": {"color": "rgba(128,140,155,0.7)", "width": 1}})
    for mark in marks:
        if mark.rank in excess.row_of and len(shapes) < 24:
            row = excess.row_of[mark.rank]
            at = {"x0": mark.first_step - half, "x1": mark.last_step + half, "y0": row - 0.5, "y1": row + 0.5}
            shapes.append({"type": "rect", **at, "line": {"color": MARK, "width": 2}})
    named = [(rank, text) for rank in _above(excess, marks) if (text := _text(excess, rank, marks))]
    annotations = [
        # Texts are above the map, because on a narrow page they would cover the steps where an excess begins.
        {
            "x": 0, "xref": "paper", "y": 1, "yref": "paper", "text": label(f"rank {rank}: {text}", 60),
            "showarrow": False, "xanchor": "left", "yanchor": "bottom",
            "yshift": 6 + TEXT_PX * (len(named) - 1 - line), "font": {"size": 11, "color": "#ffffff"},
            "bgcolor": MARK, "borderpad": 2,
        }
        for line, (rank, text) in enumerate(named)
    ]  # fmt: skip
    more_px = TEXT_PX * len(named)
    # All at once: each `add_shape` or `add_annotation` checks those before it again.
    figure.update_layout(shapes=shapes, annotations=annotations, height=height + more_px, margin_t=24 + more_px)
    return figure


def name_of(excess: Excess, one: StandingOut) -> str:
    """`+30 % from step 201 on`, `+4.1 ms in steps 20 to 39`; `about` and `around` if a cell has several steps."""
    unit = excess.unit
    size = f"+{one.value:.2g} {unit}"
    is_coarse = excess.steps_per_cell > 1  # then the first cell may also contain steps before the excess
    if one.is_rise or (one.lasts and one.first_step > int(excess.steps[0])):
        return f"{size} from {'about ' * is_coarse}step {one.first_step} on"
    if one.lasts:
        return f"{size} in all steps"
    return f"{size} {'around' if is_coarse else 'in'} steps {one.first_step} to {one.last_step}"


def _limits(excess: Excess) -> tuple[float, float]:
    """Excess at the start and at the end of the logarithmic part of the colour scale."""
    finite = np.where(np.isfinite(excess.values), excess.values, -np.inf)
    if not finite.size:
        return 1.0, 2.0
    of_rows = np.quantile(finite, 0.95, axis=1, method="lower")
    known = of_rows[np.isfinite(of_rows)]
    largest = max([float(known.max()) if len(known) else 0.0, *(one.value for one in excess.standing_out)])
    low = GROUND_SIGMAS * excess.noise or max(largest / 10, 1e-6)
    return low, max(largest, TOP_SIGMAS / GROUND_SIGMAS * low)


def _shade(values: Any, low: float, top: float) -> Floats:
    """Position of an excess on the colour scale, 0 to 1."""
    values = np.asarray(values, dtype=float)
    with np.errstate(invalid="ignore"):
        ratio = np.log(np.maximum(values, low) / low) / np.log(top / low)
        return np.where(
            np.isfinite(values), np.where(values < low, GROUND * np.clip(values, 0, low) / low,
                                          GROUND + (1 - GROUND) * np.minimum(ratio, 1)), np.nan,
        )  # fmt: skip


def _cells(excess: Excess, values: Floats, rows: list[str], ranks: list[int], low: float, top: float) -> go.Heatmap:
    shown = np.empty((*values.shape, 2))
    shown[..., 0], shown[..., 1] = np.asarray(ranks)[:, None], np.round(values, 3)
    mean = "" if excess.steps_per_cell == 1 else f" (mean of {excess.steps_per_cell} steps)"
    return go.Heatmap(
        x=excess.steps, y=rows, z=np.round(_shade(values, low, top), 3).astype(np.float32), zmin=0, zmax=1,
        customdata=shown.astype(np.float32), hoverongaps=False,
        hovertemplate="%{y}, step %{x}" + mean + "<br>%{customdata[1]:+.4g} "
        + label(excess.unit) + " over its peers<extra></extra>",
    )  # fmt: skip


def _row(excess: Excess, rank: int) -> Floats:
    named = excess.named_values.get(rank)
    return excess.values[excess.row_of[rank]] if named is None else named


def _above(excess: Excess, marks: Sequence[Mark]) -> list[int]:
    """Ranks to name above the map, ranks of findings first; at most `MAX_ABOVE`."""
    ranks = [mark.rank for mark in marks if mark.rank in excess.row_of]
    return list(dict.fromkeys([*ranks, *(one.rank for one in excess.standing_out)]))[:MAX_ABOVE]


def _text(excess: Excess, rank: int, marks: Sequence[Mark]) -> str:
    """Describe the rank's finding and its steps; for a rank without a finding, its excess in this figure."""
    for mark in marks:
        if mark.rank == rank:
            first, last = mark.first_step, mark.last_step
            return f"{mark.text}, " + (f"steps {first} to {last}" if last > first else f"step {first}")
    return ", ".join(name_of(excess, one) for one in excess.standing_out if one.rank == rank)


def _ticks(excess: Excess, is_labelled: bool) -> tuple[list[int], list[str]]:
    """Rows with a tick, and their texts."""
    ranks = excess.ranks.tolist()
    if is_labelled:
        return list(range(len(ranks))), [str(rank) for rank in ranks]
    if excess.groups:
        apart: list[tuple[str, int, int]] = []
        for group in excess.groups:
            if not apart or group[2] - apart[-1][2] >= len(ranks) / 24:
                apart.append(group)
        texts = [f"{DIMENSIONS.get(name, name)} {value}<br>rank {ranks[row]}" for name, value, row in apart]
        return [row for *_, row in apart], texts
    rows = np.unique(np.linspace(0, len(ranks) - 1, 9).round().astype(int)).tolist()
    return rows, [str(ranks[row]) for row in rows]


def _colour_bar(excess: Excess, low: float, top: float) -> dict[str, Any]:
    powers = range(int(np.floor(np.log10(low))), int(np.floor(np.log10(top))) + 1)
    found = [step * 10.0**power for power in powers for step in TICKS]
    ticks, at_top = [low], _shade(top, low, top)
    for value in found:
        at = _shade(value, low, top)
        if min(at - _shade(ticks[-1], low, top), at_top - at) >= TICK_GAP_RATIO:
            ticks.append(value)
    ticks = [0.0, *ticks, top]
    names = [f"+{float(f'{value:.2g}'):g}" for value in ticks[1:]]
    return {
        "title": {"text": f"{label(excess.unit)} over peers", "side": "right"}, "thickness": 12, "outlinewidth": 0,
        "tickvals": _shade(ticks, low, top).tolist(), "ticktext": ["0", *names],
    }  # fmt: skip
