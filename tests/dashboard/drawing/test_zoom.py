"""The zoom of a chart in the address: read back as it was written, and nothing else is obeyed."""

from __future__ import annotations

import pytest

from dashboard.drawing import zoom


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    params: dict[str, str] = {}
    monkeypatch.setattr(zoom.st, "query_params", params)
    return params


def test_a_zoom_is_read_back_for_the_same_selection_only(address: dict[str, str]) -> None:
    zoom.into_address("loss", (0, 12), {"xaxis": [10, 35.5], "yaxis2": [3.0, -1e-7]})
    assert zoom.in_address("loss", (0, 12)) == {"xaxis": (10.0, 35.5), "yaxis2": (3.0, -1e-7)}
    assert zoom.in_address("loss", (0, 13)) == {}
    assert zoom.in_address("speed", (0, 12)) == {}
    zoom.into_address("loss", (0, 12), {})
    assert not address


def test_axes_that_are_no_numbers_are_left_out(address: dict[str, str]) -> None:
    zoom.into_address("x", (), {"xaxis": [None, None], "yaxis": ["2026-01-01", "2026-01-02"], "template": [0, 1]})
    assert not address


@pytest.mark.parametrize(
    "text", ["", "all", "all~x~1", "all~x~1~nan", "all~x~1~1", "all~z~1~2", "all~x1~1~2", "all" + "~x~1~2" * 99, "~~~~"]
)
def test_a_damaged_zoom_is_none(address: dict[str, str], text: str) -> None:
    address["zoom-x"] = text
    assert zoom.in_address("x", ()) == {}
