"""Ranks at their places in the mesh, coloured by one value each, so that a slow node, stage or tensor group stands out.

    figure = draw(load_places(store), values, rows="dp_shard", columns="tp", unit="ms")

The table `places` has a column `rank` and one column per mesh dimension. Each cell is one rank, or several ranks that
share a place. Several ranks are shown with their largest value and the text `0-7, worst 3`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from plotly.graph_objects import Figure

from analyzers.figures.drawing.theme import HEAT, heat_range, label, new_figure
from analyzers.source import Floats, Source, ints
from analyzers.wording import spans_of
from probes.collectives.groups.group_label import compact_ranks

__all__ = ["DIMENSIONS", "draw", "filled_ratio", "listed", "load_places"]

DIMENSIONS = {
    "pp": "stage", "dp_replicate": "replica", "dp_shard": "shard", "cp": "context", "tp": "tensor", "ep": "expert",
    "node_rank": "node", "local_rank": "local rank",
}  # fmt: skip
"""Columns of table `ranks` with the coordinates of a rank, and the usual names of the dimensions."""
Texts = npt.NDArray[np.object_]
MAX_CELLS_WITH_TEXT = 256
TEXT_WIDTH, CHARACTER = 420, 6.5
"""Pixels for all texts in a row of cells, and for a character. Longer texts are left out, because they would be shrunk
until they are unreadable."""
MAX_RUNS, MAX_RUNS_HOVER = 2, 24
"""Maximum number of ranges of ranks that a cell and its hover text list; ranks in further ranges are counted."""


def load_places(source: Source) -> Mapping[str, Any]:
    """Columns rank, host, device and `DIMENSIONS`, from the newest record of each rank."""
    if not source.has("ranks"):
        return {name: np.zeros(0, dtype=np.int64) for name in ("rank", "host", "device", *DIMENSIONS)}
    newest = ", ".join(f"arg_max(coalesce({name}, 0), wall_ns) AS {name}" for name in DIMENSIONS)
    return source.query(
        f"SELECT rank, arg_max(host, wall_ns) AS host, arg_max(device, wall_ns) AS device, {newest} FROM ranks "
        "WHERE rank >= 0 GROUP BY rank ORDER BY rank"
    )


def draw(places: Mapping[str, Any], values: Floats, *, rows: str, columns: str, unit: str) -> Figure:
    """Rows from top to bottom, columns from left to right."""
    of_row, of_column, rank = (ints(places[name], missing=0) for name in (rows, columns, "rank"))
    up, across = np.unique(of_row), np.unique(of_column)
    grid = np.full((len(up), len(across)), np.nan)
    names, hover = np.full(grid.shape, "", dtype=object), np.full(grid.shape, "", dtype=object)
    slowest = np.full(grid.shape, "", dtype=object)
    for place in np.ndindex(*grid.shape):
        here = np.flatnonzero((of_row == up[place[0]]) & (of_column == across[place[1]]))
        if not len(here):
            continue
        members = sorted(rank[here].tolist())
        names[place], hover[place] = listed(members, MAX_RUNS), f"rank {listed(members, MAX_RUNS_HOVER)}"
        known = here[np.isfinite(values[here])]
        if len(known):
            worst = known[int(np.argmax(values[known]))]
            grid[place] = values[worst]
            slowest[place] = str(rank[worst])
        if len(members) > 1:
            hover[place] = f"ranks {listed(members, MAX_RUNS_HOVER)}"
            if len(known):
                names[place] += f", worst {rank[worst]}"
                hover[place] += f"<br>the largest is that of rank {rank[worst]}"
    text = _text(names, slowest)
    low, high = heat_range(float(np.nanmin(grid)), float(np.nanmax(grid))) if np.isfinite(grid).any() else (0.0, 1.0)
    figure = new_figure(
        height=int(min(620, max(200, 120 + 34 * len(up)))), x=DIMENSIONS.get(columns, columns),
        y=DIMENSIONS.get(rows, rows),
    )  # fmt: skip
    figure.add_heatmap(
        x=[str(value) for value in across], y=[str(value) for value in up], z=grid, colorscale=HEAT, zmin=low,
        zmax=high,
        text=text, texttemplate=None if text is None else "%{text}", xgap=2, ygap=2,
        customdata=hover, hovertemplate="%{customdata}<br>%{z:.4g} " + label(unit) + "<extra></extra>",
        colorbar={"title": {"text": label(unit), "side": "right"}, "thickness": 12, "outlinewidth": 0},
    )  # fmt: skip
    figure.update_xaxes(showgrid=False, type="category")
    figure.update_yaxes(showgrid=False, type="category", autorange="reversed")
    return figure


def filled_ratio(places: Mapping[str, Any], rows: str, columns: str) -> float:
    """Share of the cells that have a rank: two correlated dimensions (nodes and shards) may fill only a diagonal."""
    if not len(places[rows]):
        return 0.0
    of_row, of_column = ints(places[rows], missing=0), ints(places[columns], missing=0)
    cells = len(np.unique(np.stack([of_row, of_column]), axis=1)[0])
    return cells / (len(np.unique(of_row)) * len(np.unique(of_column)))


def _text(names: Texts, slowest: Texts) -> Texts | None:
    """Text of each cell. If all texts fit, it is the ranks of the cell, otherwise the slowest rank. None if this does
    not fit either."""
    for texts in (names, slowest):
        longest = max((len(str(text)) for text in texts.flat), default=0)
        if texts.size <= MAX_CELLS_WITH_TEXT and longest * CHARACTER * texts.shape[1] <= TEXT_WIDTH:
            return texts
    return None


def listed(ranks: Sequence[int], max_runs: int) -> str:
    """Ranks in order, as `3`, `0-7`, `0-12/4` or `0-3, 8 and 5 more`."""
    regular = compact_ranks(ranks)
    if "@" not in regular and "," not in regular:
        return regular
    spans = spans_of(ranks)
    shown = ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in spans[:max_runs])
    left = sum(last - first + 1 for first, last in spans[max_runs:])
    return f"{shown} and {left} more" if left else shown
