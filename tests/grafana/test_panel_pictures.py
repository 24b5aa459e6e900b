"""Pictures of the Grafana dashboards show every panel at its place, with what its query gave."""

from __future__ import annotations

import re

import pytest

from benchmarks.scale.panel_pictures import Answer, board_page, name_of
from benchmarks.scale.panels import boards


@pytest.mark.parametrize("name", sorted(boards()))
def test_every_panel_is_drawn_with_what_its_query_gave(name: str) -> None:
    board = boards()[name]
    series = Answer({"rank": "3", "stat": "max"}, [100.0, 101.0, 102.0], [0.25, 0.5, 0.75])
    drawn = [number for number, panel in enumerate(board["panels"]) if panel.get("targets")]
    answers = {number: [("rank {{rank}}", series)] for number in drawn[1:]}  # the first one's query gave nothing
    page = board_page(board, answers).split("</script><style>")[1]
    assert page.count("no data in this run") == 1
    assert len(re.findall(r'<div class="[\w-]+" style="left:', page)) == len(board["panels"])
    for number in answers:
        assert board["panels"][number]["title"].split("&")[0].split("'")[0] in page
    assert "rank 3" in page


def test_a_legend_has_its_labels_filled_in() -> None:
    labels = {"rank": "3", "device": "GPU-1", "job": "rankscope", "run_id": "demo"}
    assert name_of("rank {{rank}} {{ missing }}", labels) == "rank 3"
    assert name_of("__auto", labels) == "rank 3, device GPU-1"
