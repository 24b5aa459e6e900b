"""No chart offers to send its data anywhere: plotly's buttons for its cloud are off, wherever a chart is drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import analyzers
import dashboard
from dashboard.drawing import elements

ROOTS = (Path(dashboard.__file__).parent, Path(analyzers.__file__).parent)
SOURCES = [path for root in ROOTS for path in root.rglob("*") if path.suffix in (".py", ".js", ".html")]


def test_the_pages_charts_have_no_such_button() -> None:
    config = elements._CHART
    assert (config["showSendToCloud"], config["showLink"], config["plotlyServerURL"]) == (False, False, "")
    assert not config.get("showEditInChartStudio")


@pytest.mark.parametrize("name", ["showSendToCloud", "showEditInChartStudio", "showLink"])
def test_nothing_turns_one_on(name: str) -> None:
    turned_on = re.compile(rf"[\"']?{name}[\"']?\s*[:=]\s*[Tt]rue")
    assert [path.name for path in SOURCES if turned_on.search(path.read_text())] == []


def test_every_chart_is_drawn_with_our_configuration() -> None:
    """Streamlit's own chart element has a configuration of its own; plotly's HTML has a link to its editor."""
    foreign = re.compile(r"st\.plotly_chart\(|\.to_html\(|\.write_html\(|offline\.plot\(|chart_studio|file_uploader\(")
    assert [path.name for path in SOURCES if path.suffix == ".py" and foreign.search(path.read_text())] == []


def test_reports_name_no_server_of_plotly() -> None:
    page = (Path(analyzers.__file__).parent / "report" / "html" / "page" / "page.js").read_text()
    assert re.search(r"plotlyServerURL:\s*" "", page)
    assert re.search(r"showSendToCloud:\s*false", page)
