"""The excess over the peers: who differs, not what a step has in common."""

from __future__ import annotations

import numpy as np

from analyzers.figures import heatmap
from analyzers.figures.excess import excess_over_peers
from analyzers.figures.rank_step import Matrix


def matrix(values: list[list[float]]) -> Matrix:
    table = np.array(values)
    return Matrix(ranks=np.arange(len(table)), steps=np.arange(1, table.shape[1] + 1), values=table, unit="ms")


def test_a_long_step_is_no_excess_and_a_slow_rank_is() -> None:
    found = excess_over_peers(matrix([[10, 90, 10], [10, 90, 10], [10, 95, 30]]), {0: 0, 1: 0, 2: 0})
    assert found.values.tolist() == [[0, 0, 0], [0, 0, 0], [0, 5, 20]]


def test_ranks_are_compared_within_their_stage_and_a_rank_alone_with_nobody() -> None:
    found = excess_over_peers(matrix([[10, np.nan], [12, 10], [50, 50]]), {0: 0, 1: 0, 2: 1})
    assert found.values[:2, 0].tolist() == [-1, 1]
    assert np.isnan(found.values[:, 1]).all()
    assert np.isnan(found.values[2]).all()


def test_whole_numbers_without_a_peer_have_no_excess_either() -> None:
    found = excess_over_peers(matrix([[10, 10], [12, 10], [50, 50]]), {0: 0, 1: 0, 2: 1})
    assert np.isnan(found.values[2]).all()
    assert found.values[:2].tolist() == [[-1, 0], [1, 0]]


def test_colours_of_an_excess_begin_at_zero_and_findings_are_marked() -> None:
    mark = heatmap.Mark(rank=2, first_step=2, last_step=3, text="straggler")
    figure = heatmap.draw(matrix([[-1, 0], [0, 3]]), is_excess=True, marks=[mark])
    assert figure.data[0].zmin == 0
    (shape,) = figure.layout.shapes
    assert (shape.x0, shape.x1, shape.y0, shape.y1) == (1.5, 3.5, 1.5, 2.5)
    assert figure.layout.annotations[0].text == "straggler"
