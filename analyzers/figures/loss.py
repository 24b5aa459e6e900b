"""Loss and gradient norm over the steps, with findings, rollbacks and checkpoints marked.

figure = draw(course.loss_curve(store), course.marks(store), diagnosis.fired, evaluated=evaluations(store))

Kept steps form one line; refused or rolled-back executions are drawn faintly behind it. Findings are bands over their
steps. Rollbacks, checkpoints and other marks are symbols below the loss, at the step where they happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from analyzers.figures.course import Mark
from analyzers.figures.drawing.reduce import extremes
from analyzers.figures.drawing.theme import SEQUENCE, SEVERITY, label, new_figure, tint
from analyzers.finding import Finding
from analyzers.run.records.evaluations import Evaluation
from analyzers.source import Floats, floats, ints

__all__ = ["draw"]

MAX_BANDS = 40
MAX_MARKS = 500
MAX_SYMBOLS = 24
"""If there are more marks of one kind, they are drawn as short lines: symbols would cover each other on a phone."""
_LINE, _NORM, _VALIDATION = SEQUENCE[0], SEQUENCE[7], SEQUENCE[1]


def draw(
    curve: Mapping[str, Any],
    marks: Sequence[Mark] = (),
    findings: Sequence[Finding] = (),
    *,
    evaluated: Sequence[Evaluation] = (),
    is_numbered: bool = True,
    height: int = 420,
) -> go.Figure:
    """`curve`: columns step, loss, grad_norm, kept, in the order of training; `evaluated`: the validation losses.

    `is_numbered`: number the bands from 1 in the order of `findings`, like the cards on the page.
    """
    figure = new_figure(height=height, x="step")
    step, kept = ints(curve["step"]), np.asarray(curve["kept"], dtype=bool)
    loss, norm = floats(curve["loss"]), floats(curve["grad_norm"])
    figure.update_layout(
        yaxis={"domain": [0.34, 1], "title": {"text": "loss (nat)"}},
        yaxis2={"domain": [0, 0.26], "title": {"text": "gradient norm"}, "anchor": "x", "rangemode": "tozero"},
        xaxis={"anchor": "y2"},
    )
    _line(figure, step, np.where(kept, np.nan, loss), "discarded", {"color": tint(_LINE, 0.4), "width": 1.5}, "y")
    _line(figure, step[kept], loss[kept], "loss", {"color": _LINE, "width": 2}, "y")
    if evaluated:
        figure.add_scatter(
            x=[each.step for each in evaluated], y=[each.loss for each in evaluated], name="validation loss",
            mode="lines+markers", line={"color": _VALIDATION, "width": 1.5, "dash": "dot"}, marker={"size": 6},
            hovertemplate="step %{x}<br>%{y:.5g}<extra>validation loss</extra>",
        )  # fmt: skip
    _line(figure, step[kept], norm[kept], "gradient norm", {"color": _NORM, "width": 1.2}, "y2")
    _bands(figure, findings, is_numbered=is_numbered)
    _marks(figure, marks, step, loss)
    return figure


def _line(figure: go.Figure, step: Any, values: Floats, name: str, line: Mapping[str, Any], axis: str) -> None:
    if not np.isfinite(values).any():
        return
    keep = extremes(values)
    single = np.isfinite(values).sum() == 1
    figure.add_scatter(
        x=step[keep], y=np.where(np.isfinite(values[keep]), values[keep], np.nan), name=name, line=dict(line),
        yaxis=axis, mode="markers" if single else "lines", connectgaps=False,
        hovertemplate="step %{x}<br>%{y:.5g}<extra>" + name + "</extra>",
    )  # fmt: skip


def _bands(figure: go.Figure, findings: Sequence[Finding], *, is_numbered: bool) -> None:
    for number, finding in enumerate(findings[:MAX_BANDS], 1):
        if finding.first_step is None:
            continue
        colour = SEVERITY[finding.severity]
        last = finding.last_step if finding.last_step is not None else finding.first_step
        figure.add_shape(
            type="rect", xref="x", yref="paper", x0=finding.first_step - 0.5, x1=last + 0.5, y0=0, y1=1, layer="below",
            line={"width": 0}, fillcolor=tint(colour, 0.13 if last > finding.first_step else 0.3),
        )  # fmt: skip
        if is_numbered:
            figure.add_annotation(
                x=finding.first_step, y=1, xref="x", yref="paper", yanchor="top", xanchor="left", showarrow=False,
                text=f"{number}", font={"size": 12}, hovertext=label(finding.summary, 160),
            )  # fmt: skip


def _marks(figure: go.Figure, marks: Sequence[Mark], step: Any, loss: Floats) -> None:
    finite = loss[np.isfinite(loss)]
    if not len(finite):
        return
    foot = float(finite.min()) - 0.04 * float(np.ptp(finite) or 1.0)
    symbols = {
        "checkpoint": ("triangle-up-open", SEQUENCE[5]),
        "rollback": ("arrow-left", SEQUENCE[6]),
        "skipped batch": ("x-thin-open", SEVERITY["critical"]),
        "fault injected": ("star-open", SEQUENCE[3]),
        "restart": ("diamond-open", SEQUENCE[6]),
    }
    for kind, (symbol, colour) in symbols.items():
        of_kind = [mark for mark in marks if mark.kind == kind and mark.step is not None][:MAX_MARKS]
        if of_kind:
            is_crowded = len(of_kind) > MAX_SYMBOLS
            figure.add_scatter(
                x=[mark.step for mark in of_kind], y=[foot] * len(of_kind), mode="markers", name=kind,
                marker={
                    "symbol": "line-ns-open" if is_crowded else symbol, "color": colour, "size": 6 if is_crowded else 9,
                    "line": {"width": 1 if is_crowded else 1.5, "color": colour},
                },
                hovertext=[label(mark.text, 160) for mark in of_kind],
                hovertemplate="step %{x}<br>%{hovertext}<extra></extra>",
            )  # fmt: skip
