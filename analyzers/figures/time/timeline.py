"""Timeline of phases and collectives of the ranks in a few steps.

figure = draw(activity.timeline(store, attempt=0, first_step=38, last_step=41, ranks=[0, 1, 2, 3]))

Each rank has two lanes: spans above, collectives below. Collectives are striped, because there are more kinds than
distinguishable colours. Spans and calls that never ended are hatched and extend to the right edge. In a pipeline, thin
lines follow each microbatch from stage to stage. Spans that are long enough carry their name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from analyzers.figures.drawing.theme import ACCUSED, CALL, PHASE, SEQUENCE, ink, label, new_figure
from analyzers.figures.time.activity import MAX_ITEMS, TimelineItem
from analyzers.figures.time.attempt_marks import AttemptMark
from analyzers.figures.time.flow import Stop, add_flow

__all__ = ["draw", "matches"]

BETWEEN = "between phases"
_SPANS = PHASE | {BETWEEN: PHASE["gaps"]}
FAINT = 0.12
MAX_STEP_LABELS = 15
NAME_SIZE = 10
NAMED_RATIO = 0.04
"""Minimum share of the figure's width at which a span shows its name."""


def draw(
    items: list[TimelineItem], marks: Sequence[AttemptMark] = (), *, ranks: list[int] | None = None, find: str = ""
) -> go.Figure:
    """Draw the items over the milliseconds since the first item of each host. Items that do not match `find` are faint.

    Only `marks` between the first and the last item are drawn.
    """
    items = items[:MAX_ITEMS]
    ranks = sorted({item.rank for item in items}) if ranks is None else ranks
    lane = {rank: i for i, rank in enumerate(ranks)}
    right = max((item.end_ms if item.end_ms is not None else item.start_ms for item in items), default=1.0)
    right += 0.04 * right
    figure = new_figure(height=int(min(900, 120 + 46 * max(1, len(ranks)))), x="milliseconds", barmode="overlay")
    kinds: dict[tuple[str, bool, bool], list[TimelineItem]] = {}
    for item in sorted([*items, *between_phases(items, least_ms=NAMED_RATIO * right)], key=lambda p: p.start_ms):
        kinds.setdefault((item.kind, item.is_call, item.end_ms is None), []).append(item)
    named: set[str] = set()
    for (kind, is_call, is_open), of_kind in kinds.items():
        name = label(kind, 30)
        colour = (CALL if is_call else _SPANS).get(kind, SEQUENCE[7])
        hatched = {
            "shape": "/" if is_open else "-" if is_call else "",
            "size": 6,
            "fgcolor": "#ffffff",
            "fgopacity": 0.7 if is_open else 0.35,
            "fillmode": "overlay",
        }
        figure.add_bar(
            y=[lane[item.rank] + (0.24 if is_call else -0.16) for item in of_kind],
            x=[(right if item.end_ms is None else item.end_ms) - item.start_ms for item in of_kind],
            base=[item.start_ms for item in of_kind], orientation="h", width=0.26 if is_call else 0.46,
            name=name + (" (in flight)" if is_open else ""), legendgroup=name,
            showlegend=(is_open or name not in named) and not (is_call and not is_open and len(kinds) > 24),
            marker={
                "color": colour, "pattern": hatched, "line": {"width": 0.3, "color": "rgba(128,128,128,0.6)"},
                "opacity": [1.0 if matches(item, find) else FAINT for item in of_kind] if find else 1.0,
            },
            hovertext=[_hover(item) for item in of_kind], hovertemplate="%{hovertext}<extra></extra>",
            **_names(name, colour, of_kind, right),
        )  # fmt: skip
        named.add(name)
    stops = [
        Stop(row=lane[p.rank] - 0.16, key=(p.pipeline, p.step, p.microbatch), stage=p.stage, kind=p.kind,
             start_ms=p.start_ms, end_ms=p.end_ms)
        for p in items
        if p.stage is not None and p.microbatch is not None and p.end_ms is not None
    ]  # fmt: skip
    add_flow(figure, stops, half=0.23)
    figure.update_yaxes(
        tickmode="array", tickvals=list(lane.values()), ticktext=[f"rank {rank}" for rank in lane],
        range=[len(lane) - 0.4, -0.85], showgrid=False,
    )  # fmt: skip
    figure.update_xaxes(range=[0, right], ticksuffix=" ms", title={"text": ""})
    # Hide the name if it does not fit into its bar. By default Plotly shrinks it.
    figure.update_layout(uniformtext={"minsize": NAME_SIZE, "mode": "hide"})
    _add_steps(figure, items, right)
    _add_marks(figure, items, marks, right)
    return figure


def between_phases(items: Sequence[TimelineItem], *, least_ms: float) -> list[TimelineItem]:
    """Gaps between a rank's spans, which count as its own work. Pipelines are excluded, because there a rank waits for
    its neighbours between spans.
    """
    # Whether a rank is in a pipeline is decided per rank and not per span, because data and optimizer spans have no
    # stage.
    in_pipelines = {item.rank for item in items if item.stage is not None}
    found = []
    last_ending: dict[int, TimelineItem] = {}
    for item in sorted(items, key=lambda p: p.start_ms):
        if item.is_call or item.rank in in_pipelines:
            continue
        before = last_ending.get(item.rank)
        if before is not None and before.end_ms is not None and item.start_ms - before.end_ms >= least_ms:
            found.append(replace(before, kind=BETWEEN, start_ms=before.end_ms, end_ms=item.start_ms, detail=""))
        if before is None or (before.end_ms is not None and (item.end_ms is None or item.end_ms > before.end_ms)):
            last_ending[item.rank] = item
    return found


def matches(item: TimelineItem, find: str) -> bool:
    """Return True if all words of `find` occur in the item's name, rank, step or details."""
    text = f"{item.kind} rank {item.rank} step {item.step} {item.detail}".lower()
    return all(word in text for word in find.lower().split())


def _add_steps(figure: go.Figure, items: list[TimelineItem], right: float) -> None:
    """Add a line where the first rank begins each step, and the step number above the line if there is room."""
    begins: dict[int, float] = {}
    for item in items:
        if item.step is not None:
            begins[item.step] = min(item.start_ms, begins.get(item.step, item.start_ms))
    labelled: list[int] = []
    for step in sorted(begins, reverse=True):  # begin with the last step, which may hang, so that it gets a label
        if not labelled or begins[labelled[-1]] - begins[step] >= right / MAX_STEP_LABELS:
            labelled.append(step)
    for step, start_ms in sorted(begins.items()):
        at = {"x0": start_ms, "x1": start_ms, "y0": 0, "y1": 1, "yref": "paper"}
        figure.add_shape(type="line", **at, line={"width": 1, "dash": "dot", "color": "rgba(128,128,128,0.8)"})
        if step in labelled:
            figure.add_annotation(
                x=start_ms, y=1, yref="paper", text=f"step {step}", showarrow=False, xanchor="left", yanchor="top",
                font={"size": 11},
            )  # fmt: skip


def _names(name: str, colour: str, of_kind: list[TimelineItem], right: float) -> dict[str, Any]:
    """Names inside the bars of long enough spans. Calls get none, because their lane is too thin."""
    if of_kind[0].is_call:
        return {}
    texts = [
        name if (right if item.end_ms is None else item.end_ms) - item.start_ms >= NAMED_RATIO * right else ""
        for item in of_kind
    ]
    if not any(texts):
        return {}
    return {
        "text": texts, "texttemplate": "%{text}", "textposition": "inside", "insidetextanchor": "middle",
        "textangle": 0, "insidetextfont": {"size": NAME_SIZE, "color": ink(colour)},
    }  # fmt: skip


def _add_marks(figure: go.Figure, items: list[TimelineItem], marks: Sequence[AttemptMark], right: float) -> None:
    """Add a line for each mark between the first and the last item, with its text at the bottom.

    The end of an attempt may be shortly after its last item, so the axis is extended for it.
    """
    zeros = {item.rank: item.zero_ns for item in items}
    slack_ms = 0.02 * right
    is_marked = False
    for mark in marks if zeros else ():
        at_ms = (mark.wall_ns - zeros.get(mark.rank, min(zeros.values()))) / 1e6
        if not -slack_ms <= at_ms <= right + 2 * slack_ms:
            continue
        if at_ms > right:
            figure.update_xaxes(range=[0, at_ms + slack_ms])
        figure.add_shape(
            type="line", x0=at_ms, x1=at_ms, y0=0, y1=1, yref="paper", line={"width": 2, "color": ACCUSED[1]}
        )
        figure.add_annotation(
            x=at_ms, y=0, yref="paper", text=label(mark.text), showarrow=False, yanchor="bottom", font={"size": 11},
            xanchor="right" if at_ms > 0.5 * right else "left",
        )  # fmt: skip
        is_marked = True
    if is_marked:  # a line of text below the last rank
        bottom, top = figure.layout.yaxis.range
        figure.update_yaxes(range=[bottom + 0.35, top])


def _hover(item: TimelineItem) -> str:
    took = "in flight at the end" if item.end_ms is None else f"{item.end_ms - item.start_ms:.3f} ms"
    waited = f", waited {item.wait_ms:.3f} ms" if item.wait_ms else ""
    where = f"<br>{label(item.detail, 100)}" if item.detail else ""
    return f"rank {item.rank}, step {item.step}<br>{label(item.kind, 40)}: {took}{waited}{where}"
