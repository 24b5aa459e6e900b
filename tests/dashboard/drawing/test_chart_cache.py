from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from dashboard.drawing.chart_cache import MAX_KEPT, cached_figure


@pytest.fixture
def counted() -> tuple[Callable[..., go.Figure], list[Any]]:
    calls: list[Any] = []

    def draw(values: Any, title: str = "") -> go.Figure:
        calls.append(values)
        return go.Figure(go.Scatter(y=values["y"])).update_layout(title={"text": title})

    return draw, calls


def test_a_chart_is_built_once_while_it_shows_the_same(counted: tuple[Callable[..., go.Figure], list[Any]]) -> None:
    draw, calls = counted
    values = {"y": np.arange(3.0)}
    first = cached_figure("once", draw, (values,), {"title": "a"}, dark=False)
    assert cached_figure("once", draw, ({"y": values["y"]},), {"title": "a"}, dark=False) is first  # the same array
    assert len(calls) == 1
    assert cached_figure("once", draw, (values,), {"title": "b"}, dark=False) is not first
    assert (
        cached_figure("once", draw, ({"y": np.arange(3.0)},), {"title": "b"}, dark=False) is not first
    )  # another array
    dark = json.loads(cached_figure("once", draw, (values,), {"title": "b"}, dark=True))
    assert dark["layout"]["template"] != json.loads(first)["layout"]["template"]
    assert len(calls) == 4


def test_the_browser_gets_the_figure_unchanged(counted: tuple[Callable[..., go.Figure], list[Any]]) -> None:
    draw, _ = counted
    values = {"y": np.arange(4.0)}
    sent = json.loads(cached_figure(("run", "key"), draw, (values,), {}, dark=False))
    assert sent["data"] == json.loads(draw(values).to_json())["data"]
    assert "key" in sent["layout"]["uirevision"]


def test_the_number_of_charts_is_bounded(counted: tuple[Callable[..., go.Figure], list[Any]]) -> None:
    draw, calls = counted
    values = {"y": np.zeros(1)}
    for number in (*range(MAX_KEPT + 1), 0):
        cached_figure(("bounded", number), draw, (values,), {}, dark=False)
    assert len(calls) == MAX_KEPT + 2, "the one that was asked for longest ago was given up"


def test_a_zoom_survives_growing_data_and_is_reset_by_another_selection(
    counted: tuple[Callable[..., go.Figure], list[Any]],
) -> None:
    draw, _ = counted

    def revision(length: int, *selected: Any) -> str:
        sent = cached_figure("zoom", draw, ({"y": np.arange(length)},), {}, dark=False, selected=selected)
        revision: str = json.loads(sent)["layout"]["uirevision"]
        return revision

    assert revision(3, 0, "newest") == revision(4, 0, "newest")
    assert revision(4, 0, "newest") != revision(4, 1, "newest")
    assert revision(4, 0, 10) != revision(4, 0, 20)


def test_another_choice_of_the_same_data_is_sent_again(counted: tuple[Callable[..., go.Figure], list[Any]]) -> None:
    draw, calls = counted
    values = {"y": np.arange(3.0)}
    for step in (1, 1, 2):
        cached_figure("choice", draw, (values,), {}, dark=False, selected=(step,))
    assert len(calls) == 2
