"""The mesh: what stands in a cell can be read, and rows that fill the grid come first."""

from __future__ import annotations

from typing import Any

import numpy as np

from analyzers.figures.ranks import mesh


def places(shard: int, tensor: int, stages: int = 1, per_node: int = 8) -> dict[str, Any]:
    rank = np.arange(shard * tensor * stages)
    return {
        "rank": rank, "tp": rank % tensor, "dp_shard": rank // tensor % shard, "pp": rank // (tensor * shard),
        "node_rank": rank // per_node,
    }  # fmt: skip


def texts(of: dict[str, Any], rows: str, columns: str) -> list[str] | None:
    figure = mesh.draw(of, np.arange(len(of["rank"]), dtype=float), rows=rows, columns=columns, unit="ms")
    text = figure.data[0].text
    return None if text is None else [str(one) for one in np.asarray(text).flat]


def test_cells_have_their_ranks_where_they_fit() -> None:
    assert texts(places(2, 2), "tp", "dp_shard") == ["0", "2", "1", "3"]


def test_a_cell_of_many_ranks_names_its_slowest() -> None:
    found = texts(places(8, 8, stages=4), "dp_shard", "tp")
    assert found is not None
    assert found[:2] == ["192", "193"]


def test_a_row_too_wide_for_any_text_has_none() -> None:
    assert texts(places(64, 2), "tp", "dp_shard") is None


def test_nodes_against_shards_fill_only_a_diagonal() -> None:
    of = places(8, 8, stages=4)
    assert mesh.filled_ratio(of, "node_rank", "dp_shard") == 1 / 8
    assert mesh.filled_ratio(of, "tp", "dp_shard") == 1
