"""Figures that no page of `test_figures` draws: mesh, bands, speed, exposed communication, gradients, recovery."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.figures import gradients, speed
from analyzers.figures.drawing import series
from analyzers.figures.drawing.band import MAX_EDGE_POINTS
from analyzers.figures.drawing.theme import CATEGORY
from analyzers.figures.ranks import mesh, straggler
from analyzers.figures.time import collectives, exposed, recovery, schedule


def test_the_mesh_names_every_rank_of_a_place_and_the_worst() -> None:
    rank = np.arange(24)
    places = {"rank": rank, "dp_shard": rank // 8, "tp": np.zeros(24, np.int64)}
    values = np.where(rank == 3, 9.0, 1.0 + rank / 100)
    values[8:16] = np.nan
    (cells,) = mesh.draw(places, values, rows="dp_shard", columns="tp", unit="ms").data
    assert np.asarray(cells.text)[:, 0].tolist() == ["0-7, worst 3", "8-15", "16-23, worst 23"]
    assert np.asarray(cells.customdata)[0, 0] == "ranks 0-7<br>the largest is that of rank 3"
    assert np.asarray(cells.z)[:, 0].tolist() == pytest.approx([9.0, np.nan, 1.23], nan_ok=True)
    (cells,) = mesh.draw(places, values, rows="tp", columns="dp_shard", unit="ms").data
    assert np.asarray(cells.text).shape == (1, 3)


def test_one_rank_a_place_is_named_by_its_number() -> None:
    places = {"rank": np.array([5, 6]), "pp": np.array([0, 1]), "tp": np.array([0, 0])}
    (cells,) = mesh.draw(places, np.array([1.0, 2.0]), rows="tp", columns="pp", unit="ms").data
    assert np.asarray(cells.text).tolist() == [["5", "6"]]
    assert np.asarray(cells.customdata).tolist() == [["rank 5", "rank 6"]]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([7], "7"), ([0, 1, 2], "0-2"), ([0, 4, 8], "0-8/4"), ([0, 1, 2, 5], "0-2, 5"), ([0, 5, 9, 11], "0, 5 and 2 more"),
     ([*range(4), *range(8, 12), 20, 21, 22], "0-3, 8-11 and 3 more")],
)  # fmt: skip
def test_rank_lists_are_short_and_complete(ranks: list[int], text: str) -> None:
    assert mesh.listed(ranks, 2) == text


def test_a_band_has_its_edges_its_median_and_its_largest() -> None:
    at = np.arange(9_000)
    high = np.full(9_000, 3.0)
    high[4_321] = 50.0
    low, filled, median, largest = series.band(
        at, np.ones(9_000), np.full(9_000, 2.0), high, x="step", y="memory (MiB)"
    ).data
    assert (filled.fill, median.name, largest.name) == ("tonexty", "median", "largest")
    assert len(low.x) == len(filled.x) <= MAX_EDGE_POINTS
    assert list(low.x) == list(filled.x), "the edges are those of the same steps"
    assert max(filled.y) == max(largest.y) == 50
    assert set(low.y) == {1}
    assert set(median.y) == {2}


def test_named_lines_are_bounded_and_keep_their_order() -> None:
    lines = [series.Series(name=f"rank {i}", x=np.arange(3), y=np.full(3, float(i))) for i in range(40)]
    figure = series.draw(lines, x="step", y="ms", log=True)
    assert [trace.name for trace in figure.data] == [f"rank {i}" for i in range(series.MAX_LINES)]
    assert figure.layout.yaxis.type == "log"
    (alone,) = series.draw([series.Series(name="a", x=np.arange(2), y=np.array([np.nan, 1.0]))], x="", y="").data
    assert alone.mode == "markers", "one value is a point, a line of it would be seen by nobody"


def test_speed_has_the_ranks_above_and_the_tokens_below() -> None:
    curve = {"step": np.arange(5), "low": np.full(5, 1.0), "middle": np.full(5, 2.0), "high": np.full(5, 3.0),
             "tokens_per_s": np.full(5, 700.0)}  # fmt: skip
    by_name = {trace.name: trace for trace in speed.draw(curve).data if trace.name}
    assert set(by_name["median of the ranks"].y) == {2}
    assert set(by_name["10th to 90th percentile"].y) == {3}
    assert (set(by_name["tokens/s"].y), by_name["tokens/s"].yaxis) == ({700}, "y2")
    assert by_name["median of the ranks"].yaxis in (None, "y")


def test_exposed_communication_is_stacked_from_what_costs_most() -> None:
    parts = [np.full(3, value) for value in (4.0, 2.0, 1.0)]
    traces = exposed.draw(np.arange(3), *parts).data
    assert [(trace.name.split(":")[0], trace.y[0]) for trace in traces] == [
        ("exposed", 4), ("exposed", 2), ("hidden behind computation", 1),
    ]  # fmt: skip
    assert len({trace.stackgroup for trace in traces}) == 1


def test_gradients_stand_in_the_order_of_the_model() -> None:
    names = ["blocks.10.w", "head.weight", "blocks.9.w", "embedding.weight"]
    table = {"parameter": np.array(names * 2, dtype=object), "step": np.repeat([10, 20], 4),
             "norm": np.array([1.0, 10.0, 100.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
             "nonfinite": np.array([0.0, 0, 0, 0, 0, 3, 0, 0])}  # fmt: skip
    (norms,) = gradients.norms(table).data
    assert list(norms.y) == ["embedding.weight", "blocks.9.w", "blocks.10.w", "head.weight"]
    assert np.asarray(norms.z)[:, 0].tolist() == pytest.approx([np.nan, 2, 0, 1], nan_ok=True)
    (bad,) = gradients.nonfinite(table).data
    assert list(bad.y) == ["head.weight"], "only what ever held one"
    assert dict(zip(bad.x, np.asarray(bad.customdata)[0], strict=True)) == {"10": 0, "20": 3}


def test_the_life_of_a_run_has_a_lane_an_attempt() -> None:
    phases = [(0, "start-up", 0.0, 2.0), (0, "training", 2.0, 9.0), (1, "training", 12.0, 20.0)]
    moments = [(8.5, 0, "rank ended", "rank 1: SIGKILL"), (13.0, 1, "loaded", "step 30"), (1.0, 0, "no such", "x")]
    by_name = {trace.name: trace for trace in recovery.draw(phases, moments).data}
    assert set(by_name) == {"start-up", "training", "rank ended", "loaded"}
    assert list(by_name["training"].y) == [0, 1]
    assert list(by_name["training"].base) == [2, 12]
    assert list(by_name["training"].x) == [7, 8]
    assert by_name["training"].marker.color == CATEGORY["training"]
    assert by_name["rank ended"].hovertext == ("rank 1: SIGKILL",)


def test_reference_lines_are_named() -> None:
    work = {"rank": np.arange(3), **dict.fromkeys(("data", "forward", "backward", "optimizer", "gaps"), np.ones(3))}
    (line,) = straggler.ranking(work).layout.shapes
    assert (line.showlegend, line.name) == (True, "median of all ranks")
    by_step = schedule.idle_by_step({1: 0.4, 2: 0.5, 3: 0.45}, expected=0.3)
    assert [note.text for note in by_step.layout.annotations] == ["equal stages"]


def test_bars_of_a_subset_state_the_total() -> None:
    num = collectives.MAX_BARS + 2
    calls = {"op": ["all_reduce"] * num, "process_group": [f"tp:{i}" for i in range(num)], "wait_s": np.ones(num)}
    assert collectives.waits(calls).layout.xaxis.title.text == "seconds waited, all ranks<br>the 14 longest of 16"
    few = {name: column[:2] for name, column in calls.items()}
    assert collectives.waits(few).layout.xaxis.title.text == "seconds waited, all ranks"


def test_the_label_of_a_long_bar_is_inside_of_it() -> None:
    """Beside the longest bar of 256 ranks, it was cut at the edge of a narrow screen."""
    calls = {"op": ["all_reduce", "send"], "process_group": ["world:0-255"] * 2, "wait_s": np.array([12345.6, 0.01234])}
    (bars,) = collectives.waits(calls).data
    assert bars.textposition == "auto"
    assert list(bars.text) == ["12,346 s", "0.0123 s"]
    assert list(bars.y) == ["all_reduce · world:0-255", "send · world:0-255"]
    (bars,) = collectives.waits(calls | {"process_group": ["dp_shard:131-255, every 4th", "tp:0-3"]}).data
    assert [name.count("<br>") for name in bars.y] == [1, 1], "a long name leaves no place for the bars"
