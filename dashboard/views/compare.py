"""Page that compares two to eight runs with a baseline: speed, loss, settings, findings."""

from __future__ import annotations

import re
from textwrap import shorten
from typing import Any

import numpy as np
import streamlit as st
from plotly.graph_objects import Figure

from analyzers.compare.delta_words import delta_words
from analyzers.compare.two_runs import Comparison
from analyzers.figures.drawing import series
from analyzers.figures.drawing.theme import SEQUENCE
from analyzers.report.terminal.compare_text import manifest_tables, tables
from analyzers.source import floats, ints
from dashboard.data.run_access import RunAccess
from dashboard.drawing.elements import chart, empty_state, markdown_text, table, unique_names
from dashboard.frame import View, access_to, framed, runs_folder
from probes.tape.redaction.printable import visible
from probes.tape.rundir import RunError

__all__ = ["MAX_RUNS", "compare", "without_common_prefix"]

MAX_RUNS = 8
SENTENCE, MAX_SENTENCE = 60, 190
"""A value of more than `SENTENCE` characters is a sentence and wraps. Beyond `MAX_SENTENCE` characters it is cut with
an ellipsis, because the page Findings shows all of it."""
_LINE_CHARS, _LINE_PX, _CELL_PX = 24, 19, 20
"""For columns that wrap: minimum number of characters per line, height of a line, and height that a cell adds to its
lines (pixels)."""
_MANIFEST_TABLES = ("Setting", "Version", "Launch")
"""Tables of settings and facts, in which a long value does not make the row taller."""
_BASELINE_COLOUR = SEQUENCE[7]


@framed("Compare runs")
def compare(view: View) -> None:
    """Compare the selected run with others of the folder."""
    names = runs_folder().run_ids()
    if not [name for name in names if name != view.run_id]:
        empty_state("There is only one run in this folder.", "Train another run to compare it with this one.")
        return
    runs, baseline = _chosen(view, names)
    if len(runs) < 2:
        empty_state("Choose at least one other run.")
        return
    base = _access(baseline)
    found: dict[str, dict[str, Any]] = {}
    for name in runs:
        other = _access(name) if name != baseline else None
        if base is not None and other is not None:
            compared = _answer(view, other, base, name)
            if compared is not None:
                found[name] = compared
    if not found:
        return
    if len(runs) == 2:
        for name, only in found.items():
            st.markdown(f"**{markdown_text(only['comparison'].sentence, 500)}**")
            _losses(baseline, found)
            _details(baseline, name, only["comparison"])
        return
    _summary(baseline, found)
    _losses(baseline, found)
    _settings(baseline, found)
    for name, answer in found.items():
        with st.expander(markdown_text(f"{name} against {baseline}", 200)):
            st.markdown(f"**{markdown_text(answer['comparison'].sentence, 500)}**")
            _details(baseline, name, answer["comparison"])


def _chosen(view: View, names: list[str]) -> tuple[list[str], str]:
    """The runs, newest first, and the baseline, which by default is the oldest of them."""
    others = [name for name in names if name != view.run_id]
    index = names.index(view.run_id) if view.run_id in names else -1
    named = st.query_params.get("baseline")
    # By default the baseline is the run before this one.
    other = named if named in others else others[min(max(index, 0), len(others) - 1)]
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        chosen = st.multiselect(
            "Compared with", others, default=[other], key="with", format_func=visible, width=520,
            max_selections=MAX_RUNS - 1, bind="query-params",
        )  # fmt: skip
        runs = [name for name in names if name == view.run_id or name in chosen]
        baseline = st.selectbox(
            "Baseline", runs, index=len(runs) - 1, key="baseline", format_func=visible, width=360, bind="query-params"
        )
    return runs, baseline if baseline in runs else runs[-1]


def _access(name: str) -> RunAccess | None:
    """Access to a run; if it cannot be read, draw a message and return None."""
    try:
        return access_to(runs_folder().open(name))
    except RunError as error:
        empty_state("A run cannot be read.")
        st.text(visible(str(error)[:500]))
        return None


def _answer(view: View, run: RunAccess, base: RunAccess, name: str) -> dict[str, Any] | None:
    """The comparison with the baseline; if there is none yet, draw a message and return None."""
    answer = run.compared_with(base)
    shown = markdown_text(name, 100)
    if answer.value is None:
        if answer.error is not None:
            st.caption(f"{shown}\\: the two runs cannot be compared.")
            st.text(visible(str(answer.error)[:500]))
            view.is_pending = True
        else:
            st.caption(f"{shown}\\: comparing…")
            view.expect(answer)
        return None
    if answer.error is not None:
        st.caption(f"{shown}\\: the two runs cannot be compared now. The last comparison is shown.")
        st.text(visible(str(answer.error)[:500]))
    if not answer.is_fresh:
        view.is_pending = True
        if answer.error is None:
            st.caption("A newer comparison is being computed.")
    found: dict[str, Any] = answer.value
    return found


def _summary(baseline: str, found: dict[str, dict[str, Any]]) -> None:
    """One row per run: its difference from the baseline, and whether it exceeds the noise."""
    comparisons: dict[str, Comparison] = {name: answer["comparison"] for name, answer in found.items()}
    first = next(iter(comparisons.values()))
    rows: list[dict[str, Any]] = [
        {
            "run": baseline, "step (ms)": round(first.speed.ms_before, 2) if first.speed else None, "delta": "baseline",
            "speed": "", "goodput": _percent(first.goodput["training"][0]), "loss": "", "findings": "", "settings": "",
        }
    ]  # fmt: skip
    for name, comparison in comparisons.items():
        speed, words = comparison.speed, delta_words(comparison)
        rows.append(
            {
                "run": name,
                "step (ms)": round(speed.ms_after, 2) if speed else None,
                "delta": f"{speed.ms_after - speed.ms_before:+.2f} ms" if speed else None,
                "speed": words.speed, "goodput": _percent(comparison.goodput["training"][1]), "loss": words.loss,
                "findings": words.findings, "settings": words.settings,
            }
        )  # fmt: skip
    table(
        rows, key="compare-summary",
        column_config={"run": st.column_config.TextColumn("run", pinned=True, width="medium")},
    )  # fmt: skip
    st.caption(
        "Speed and loss against the baseline. A change within the interval or the noise is not called a difference."
    )


def _settings(baseline: str, found: dict[str, dict[str, Any]]) -> None:
    """Settings and versions in which any run differs from the baseline, side by side."""
    headings = unique_names(("", baseline, *found))
    for heading, rows in manifest_tables([one["comparison"] for one in found.values()]):
        if rows:
            st.subheader(heading, anchor=False)
            columns = [list(column) for column in zip(*rows, strict=True)]
            table(dict(zip(headings, columns, strict=True)), key=f"compare-all-{heading}")


def _details(baseline: str, name: str, comparison: Comparison) -> None:
    headings = unique_names(("", *without_common_prefix(baseline, name)))
    for heading, rows in tables(comparison):
        if rows:
            st.subheader(heading, anchor=False)
            longest = max(len(text) for row in rows for text in row[1:])
            is_long = heading not in _MANIFEST_TABLES and longest > SENTENCE
            columns = [[row[0] for row in rows], *([_fitting(row[column]) for row in rows] for column in (1, 2))]
            num_lines = -(-min(longest, MAX_SENTENCE) // _LINE_CHARS)
            table(
                dict(zip(headings, columns if is_long else zip(*rows, strict=True), strict=True)),
                key=f"compare-{heading}-{name}", row_height=_CELL_PX + _LINE_PX * num_lines if is_long else None,
                column_config={name: st.column_config.TextColumn(width="medium") for name in headings[1:] if is_long},
            )  # fmt: skip


def _fitting(text: str) -> str:
    """The text, cut between words if it is longer than its cell."""
    return shorten(text, MAX_SENTENCE, placeholder=" …")


def without_common_prefix(one: str, other: str) -> tuple[str, str]:
    """Shorten names for headings, so that two columns fit on a narrow page: `…051125` and `…051335`."""
    words, others = re.split(r"(?<=[-_.])", one), re.split(r"(?<=[-_.])", other)
    pairs = enumerate(zip(words[:-1], others[:-1], strict=False))
    common = next((index for index, (a, b) in pairs if a != b), min(len(words), len(others)) - 1)
    if not common:
        return one, other
    return "…" + "".join(words[common:]), "…" + "".join(others[common:])


def _losses(baseline: str, found: dict[str, dict[str, Any]]) -> None:
    curves = [(baseline, next(iter(found.values()))["loss_a"])]
    curves += [(name, answer["loss_b"]) for name, answer in found.items()]
    if any(np.asarray(curve["kept"], dtype=bool).any() for _, curve in curves):
        names = tuple(name for name, _ in curves)
        chart(
            _loss_figure, names, *(curve for _, curve in curves), key="compare-loss", selected=names,
            what="Loss of the runs over the steps",
        )  # fmt: skip
    else:
        empty_state("None of these runs has recorded a loss.")


def _loss_figure(names: tuple[str, ...], *curves: dict[str, Any]) -> Figure:
    lines = []
    for number, (name, curve) in enumerate(zip(names, curves, strict=True)):
        kept = np.asarray(curve["kept"], dtype=bool)
        if kept.any():
            lines.append(
                series.Series(
                    name=name, x=ints(curve["step"])[kept], y=floats(curve["loss"])[kept],
                    colour=SEQUENCE[number - 1] if number else _BASELINE_COLOUR,
                )
            )  # fmt: skip
    return series.draw(lines, x="step", y="loss (nat)", height=340)


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.1f} %"
