"""Timeline of a run: its phases, failures, and the steps from which it continued.

    figure = draw(phases, moments)

`phases`: (attempt, word, begin_s, end_s), seconds since the run began. `moments`: (seconds, attempt, kind, text).
"""

from __future__ import annotations

from collections.abc import Sequence

from plotly.graph_objects import Figure

from analyzers.figures.drawing.theme import CATEGORY, SEQUENCE, SEVERITY, label, new_figure

__all__ = ["draw"]

MAX_MOMENTS = 400
_WORDS = {
    "start-up": CATEGORY["startup"], "training": CATEGORY["training"], "repeating steps": CATEGORY["recomputed"],
    "silent": CATEGORY["hang"], "down": CATEGORY["restart"], "ending": CATEGORY["shutdown"],
}  # fmt: skip
_SYMBOLS = {
    "checkpoint": ("triangle-up", SEQUENCE[5]),
    "rollback": ("arrow-left", SEQUENCE[6]),
    "loaded": ("triangle-down", SEQUENCE[5]),
    "rank ended": ("x", SEVERITY["critical"]),
    "killed by watch": ("cross", SEVERITY["critical"]),
    "fault injected": ("star", SEQUENCE[3]),
    "preempted": ("square", SEQUENCE[7]),
}


def draw(phases: Sequence[tuple[int, str, float, float]], moments: Sequence[tuple[float, int, str, str]]) -> Figure:
    """Draw one lane per attempt, seconds from left to right."""
    attempts = sorted({attempt for attempt, *_ in phases})
    figure = new_figure(height=int(min(620, 150 + 54 * max(1, len(attempts)))), x="seconds", barmode="overlay")
    for word, colour in _WORDS.items():
        bars = [phase for phase in phases if phase[1] == word]
        if bars:
            figure.add_bar(
                y=[attempt for attempt, *_ in bars], x=[end - begin for _, _, begin, end in bars],
                base=[begin for _, _, begin, _ in bars], orientation="h", width=0.5, name=word,
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate="attempt %{y}: " + word + " for %{x:.3g} s<extra></extra>",
            )  # fmt: skip
    for kind, (symbol, colour) in _SYMBOLS.items():
        shown = [moment for moment in moments if moment[2] == kind][:MAX_MOMENTS]
        if shown:
            figure.add_scatter(
                x=[seconds for seconds, *_ in shown], y=[attempt - 0.38 for _, attempt, *_ in shown], mode="markers",
                name=kind, marker={"symbol": symbol, "color": colour, "size": 10, "line": {"width": 0}},
                hovertext=[label(text, 160) for *_, text in shown],
                hovertemplate="%{x:.1f} s<br>%{hovertext}<extra></extra>",
            )  # fmt: skip
    figure.update_yaxes(
        tickmode="array", tickvals=attempts, ticktext=[f"attempt {attempt}" for attempt in attempts],
        range=[max(attempts, default=0) + 0.5, -0.7], showgrid=False,
    )  # fmt: skip
    figure.update_xaxes(ticksuffix=" s", title={"text": ""})
    return figure
