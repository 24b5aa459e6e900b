"""Colours that share a chart differ for everybody, and text is read on its ground.

How a dichromat sees a colour: Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB. How far two colours are
apart: CIE 1976, in L*a*b* under D65, in which 2.3 is a just noticeable difference of two patches side by side.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import analyzers.report
from analyzers.figures.drawing import bars, series, theme
from analyzers.figures.ranks import agreement
from analyzers.figures.time import recovery, timeline
from analyzers.figures.time.activity import TimelineItem
from analyzers.figures.time.schedule import draw as draw_schedule

Matrix = npt.NDArray[np.float64]
SEEN: dict[str, Matrix] = {
    "everybody": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                   [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
LEAST_DIFFERENCE = 15.0
GROUNDS = {False: ("#ffffff", "#f6f7f9"), True: ("#0e1117", "#0f1319", "#161c24")}
"""What lies beneath a figure, in the report and on the pages."""
TOGETHER = {
    "lines": dict(enumerate(theme.SEQUENCE)),
    "collectives": theme.CALL,
    "goodput": theme.CATEGORY,
    "phases": theme.PHASE,
    "severities": theme.SEVERITY,
    "accused beside the others": dict(enumerate((*theme.ACCUSED, theme.SEQUENCE[0]))),
    "life of a run": recovery._WORDS,
}


def lab(colour: str, seen_by: str) -> Matrix:
    """L*a*b* of `#rrggbb` as somebody sees it."""
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(SEEN[seen_by] @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("seen_by", SEEN)
@pytest.mark.parametrize("name", TOGETHER)
def test_colours_of_one_chart_differ(name: str, seen_by: str) -> None:
    near = {
        (a, b): round(float(np.linalg.norm(lab(one, seen_by) - lab(other, seen_by))), 1)
        for (a, one), (b, other) in itertools.combinations(TOGETHER[name].items(), 2)
        if np.linalg.norm(lab(one, seen_by) - lab(other, seen_by)) < LEAST_DIFFERENCE
    }
    assert not near


def test_the_simulation_gives_the_published_values_of_known_colours() -> None:
    assert np.linalg.norm(lab("#ff0000", "everybody") - lab("#00ff00", "everybody")) > 150
    assert lab("#ffffff", "everybody") == pytest.approx([100, 0, 0], abs=0.01)
    for seen_by in SEEN:
        assert lab("#808080", seen_by) == pytest.approx(lab("#808080", "everybody"), abs=0.1), "grey stays grey"
    confused = lab("#4aa3a2", "deuteranopia") - lab("#8a94a3", "deuteranopia")
    assert np.linalg.norm(confused) == pytest.approx(0.9, abs=0.1), "evaluation and other, as they once were"


@pytest.mark.parametrize("dark", [False, True])
def test_colours_and_text_have_contrast_with_their_background(dark: bool) -> None:
    used = {colour for of in TOGETHER.values() for colour in of.values()}
    layout = theme.template(dark=dark)["layout"]
    texts = {
        layout["font"]["color"],
        layout["annotationdefaults"]["font"]["color"],
        layout["hoverlabel"]["font"]["color"],
    }
    for ground in GROUNDS[dark]:
        assert min(theme.contrast(colour, ground) for colour in used) > 1.25
        assert min(theme.contrast(text, ground) for text in texts) >= 4.5
    assert theme.contrast(layout["hoverlabel"]["font"]["color"], layout["hoverlabel"]["bgcolor"]) >= 4.5


def test_report_text_has_contrast_with_the_page_and_its_cards() -> None:
    css = (Path(analyzers.report.__file__).parent / "html" / "page" / "page.css").read_text(encoding="utf-8")
    blocks = [part.split("}")[0] for part in css.split(":root {")[1:3]]  # the third is for paper
    light, dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in blocks)
    assert set(light) == set(dark) >= {"text", "soft", "faint", "ground", "card"}
    for colours in (light, dark):
        for text in ("text", "soft", "faint", "critical", "warning", "info"):
            for ground in ("ground", "card"):
                assert theme.contrast(colours[text], colours[ground]) >= 4.5, (text, ground, colours[text])


@pytest.mark.parametrize("colour", sorted({colour for of in TOGETHER.values() for colour in of.values()}))
def test_ink_has_contrast_with_every_colour(colour: str) -> None:
    assert theme.contrast(theme.ink(colour), colour) >= 4.5


def test_numbers_within_bars_are_written_in_ink() -> None:
    kinds = ["forward", "backward", "send"]
    pieces = {"stage": np.zeros(3, int), "microbatch": np.arange(3), "kind": np.array(kinds, dtype=object),
              "rank": np.zeros(3, int), "start_ms": np.arange(3.0), "end_ms": np.arange(3.0) + 1}  # fmt: skip
    for trace in draw_schedule(pieces, flow=False).data:
        assert theme.contrast(trace.textfont.color, trace.marker.color) >= 4.5


def test_the_ninth_line_has_another_dash_and_accused_ranks_a_pattern() -> None:
    lines = [series.Series(name=str(i), x=np.arange(3), y=np.arange(3.0)) for i in range(series.MAX_LINES)]
    looks = [(trace.line.color, trace.line.dash) for trace in series.draw(lines, x="", y="").data]
    assert len(set(looks)) == series.MAX_LINES
    (bar,) = bars.draw({"a": 1.0, "b": 2.0}, accused={"b"}, x="", unit="").data
    assert tuple(bar.marker.pattern.shape) == ("", "/")


def test_phases_and_collectives_of_one_timeline_look_different() -> None:
    pieces = [
        TimelineItem(rank=0, kind=kind, is_call=is_call, start_ms=i, end_ms=i + 1.0)
        for is_call, kinds in ((False, theme.PHASE), (True, theme.CALL))
        for i, kind in enumerate(kinds)
    ]
    looks = [(trace.marker.color, trace.marker.pattern.shape) for trace in timeline.draw(pieces).data]
    assert len(set(looks)) == len(looks) == len(theme.PHASE) + len(theme.CALL)


def test_a_map_of_who_agrees_has_a_colour_a_state_and_none_between() -> None:
    (grid,) = agreement.draw(["rank 0"], ["10", "20", "30"], np.array([[0.0, 1.0, 2.0]]), x="check").data
    shown = [grid.colorscale[2 * state : 2 * state + 2] for state in range(3)]
    for state, ((low, colour), (high, same)) in enumerate(shown):
        place = (state - grid.zmin) / (grid.zmax - grid.zmin)
        assert low < place < high
        assert colour == same
    assert len({colour for (_, colour), _ in shown}) == 3
    (two,) = agreement.draw(["rank 0"], ["a"], np.array([[1.0]]), x="", legend=("finite", "NaN or Inf")).data
    assert [place for place, _ in two.colorscale] == [0, 0.5, 0.5, 1]
