"""The excess over the peers: who differs, not what a step has in common; and which rank is named, however many run."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest

from analyzers.figures.ranks import excess_map
from analyzers.figures.ranks.excess import MAX_ROWS, Excess, Places, excess_over_peers
from analyzers.figures.ranks.heatmap import Mark
from analyzers.figures.ranks.rank_step import Matrix, rank_step
from tests.analyzers.memory_store import MemoryStore
from tests.depth import tried
from tests.support.simulator.layout import Layout


def matrix(values: list[list[float]]) -> Matrix:
    table = np.array(values)
    return Matrix(ranks=np.arange(len(table)), steps=np.arange(1, table.shape[1] + 1), values=table, unit="ms")


def places(*stages: int) -> Places:
    return Places(ranks=np.arange(len(stages)), coordinates={"pp": np.array(stages)})


def simulated(ranks: int, factor: float, *, columns: int = 100, onset: int = 50, seed: int = 0) -> tuple[Excess, int]:
    """Own work of ranks as real ones vary (0.4 % a cell, 0.3 % for good), one of them slower from a column on."""
    rng = np.random.default_rng(seed)
    values = 96.0 * np.exp(0.004 * rng.standard_normal((ranks, columns)) + 0.003 * rng.standard_normal((ranks, 1)))
    values *= 1 + 0.5 * (np.arange(columns) % 20 == 7)  # a long step is long on all ranks
    slow = ranks * 7 // 10 + 3
    values[slow, onset:] *= factor
    layout = Layout(pp=4, dp_replicate=ranks // 32, tp=8)
    cells = Matrix(ranks=np.arange(ranks), steps=1 + 4 * np.arange(columns), values=values, unit="ms", steps_per_cell=4)
    return excess_over_peers(cells, Places(ranks=np.arange(ranks), coordinates=layout.coordinates())), slow


def test_a_long_step_is_no_excess_and_a_slow_rank_is() -> None:
    found = excess_over_peers(matrix([[10, 90, 10], [10, 90, 10], [10, 95, 30]]), places(0, 0, 0))
    assert found.unit == "%"
    assert np.round(found.values, 1).tolist() == [[0, 0, 0], [0, 0, 0], [0, 5.6, 200]]


def test_ranks_are_compared_within_their_stage_and_a_rank_alone_with_nobody() -> None:
    found = excess_over_peers(matrix([[10, np.nan], [12, 10], [50, 50]]), places(0, 0, 1))
    assert np.round(found.values[:2, 0], 1).tolist() == [-9.1, 9.1]
    assert np.isnan(found.values[:, 1]).all()
    assert np.isnan(found.values[2]).all()


def test_whole_numbers_without_a_peer_have_no_excess_either() -> None:
    found = excess_over_peers(matrix([[10, 10], [12, 10], [50, 50]]), places(0, 0, 1))
    assert np.isnan(found.values[2]).all()


def test_times_about_zero_keep_their_unit() -> None:
    rng = np.random.default_rng(0)
    waits = np.abs(rng.standard_normal((16, 50)))
    assert excess_over_peers(matrix(waits.tolist()), places(*[0] * 16)).unit == "ms"


@pytest.mark.parametrize("ranks", [256, 1024, 4096])
@pytest.mark.parametrize("factor", [1.01, 1.30])
def test_the_slow_rank_of_many_is_named_and_its_row_is_bright(ranks: int, factor: float) -> None:
    found, slow = simulated(ranks, factor)
    (one,) = found.standing_out
    assert one.rank == slow
    assert one.value == pytest.approx(100 * (factor - 1), abs=0.3)
    assert 185 <= one.first_step <= 217
    assert one.lasts
    assert len(found.ranks) <= MAX_ROWS + 4  # a part of a stage may be short
    assert found.ranks[found.row_of[slow]] == slow
    figure = excess_map.draw(found)
    shades = {trace.y[0]: np.asarray(trace.z, dtype=float) for trace in figure.data}
    (own,) = (shade for name, shade in shades.items() if name == f"rank {slow}")
    every = np.asarray(figure.data[0].z, dtype=float)
    assert np.median(own[0, 55:]) > 2 * np.median(every), "noise is quiet, and the slow rank is not"
    assert np.median(every) < excess_map.GROUND
    assert (every > excess_map.GROUND).mean() < 0.1
    if factor > 1.1:
        assert np.median(own[0, 55:]) > 0.95, "the colours reach it"
    assert any(
        text.text.startswith(f"rank {slow}: +") and "from about step" in text.text for text in figure.layout.annotations
    )


def test_no_rank_is_named_because_its_first_steps_were_shorter_than_those_of_its_peers() -> None:
    rng = np.random.default_rng(3)
    values = 130.0 * np.exp(0.005 * rng.standard_normal((64, 60)))
    values[:, :3] = 7_000.0 * np.exp(0.06 * rng.standard_normal((64, 1)))  # a rank compiles longer, or shorter
    found = excess_over_peers(matrix(values.tolist()), places(*[0] * 64))
    assert found.standing_out == ()
    values[9, 40:] *= 1.05
    found = excess_over_peers(matrix(values.tolist()), places(*[0] * 64))
    assert [(one.rank, one.first_step) for one in found.standing_out] == [(9, 41)]


@pytest.mark.parametrize("seed", range(tried(4, nightly=20)))
def test_no_rank_of_a_clean_run_is_named(seed: int) -> None:
    found, _ = simulated(512, 1.0, seed=seed)
    assert found.standing_out == ()


@pytest.mark.parametrize("seed", range(tried(4, nightly=20)))
def test_two_pauses_in_the_last_steps_of_a_rank_name_nobody(seed: int) -> None:
    """Ranks differ for good by more than their cells change: a pause is not as long as the first allows."""
    rng = np.random.default_rng(seed)
    values = 96.0 * np.exp(0.002 * rng.standard_normal((256, 60)) + 0.004 * rng.standard_normal((256, 1)))
    values[77, 58:] *= 1.03
    assert excess_over_peers(matrix(values.tolist()), places(*[0] * 256)).standing_out == ()
    values[77, 40:] *= 1.01
    (one,) = excess_over_peers(matrix(values.tolist()), places(*[0] * 256)).standing_out
    assert (one.rank, one.is_rise) == (77, True)
    assert 39 <= one.first_step <= 42


def test_one_long_step_of_a_rank_is_bright_and_names_nobody() -> None:
    rng = np.random.default_rng(1)
    values = 96.0 * np.exp(0.004 * rng.standard_normal((512, 100)))
    values[77, 30] *= 3
    cells = Matrix(ranks=np.arange(512), steps=np.arange(100), values=values, unit="ms")
    found = excess_over_peers(cells, Places(ranks=np.arange(512), coordinates={}))
    assert found.standing_out == ()
    assert found.ranks[found.row_of[77]] == 77, "its part shows it, not the mean"
    figure = excess_map.draw(found)
    assert np.asarray(figure.data[0].z, dtype=float)[found.row_of[77], 30] == 1.0
    assert excess_map._colour_bar(found, 18.0, 142.0)["ticktext"][-1] == "+140", "no power of ten"


def test_rows_are_in_the_order_of_the_mesh_with_its_parts() -> None:
    stage = np.tile([0, 1], 40)  # ranks of two stages, interleaved
    rng = np.random.default_rng(0)
    values = np.where(stage == 0, 10.0, 20.0)[:, None] * np.exp(0.01 * rng.standard_normal((80, 30)))
    cells = Matrix(ranks=np.arange(80), steps=np.arange(30), values=values, unit="ms")
    found = excess_over_peers(cells, Places(ranks=np.arange(80), coordinates={"pp": stage}))
    assert found.ranks.tolist() == [*range(0, 80, 2), *range(1, 80, 2)]
    assert found.groups == (("pp", 0, 0), ("pp", 1, 40))
    assert figure_texts(excess_map.draw(found)) == ["stage 0<br>rank 0", "stage 1<br>rank 1"]


def figure_texts(figure: go.Figure) -> list[str]:
    return list(figure.layout.yaxis.ticktext)


def test_findings_are_marked_with_their_names() -> None:
    mark = Mark(rank=2, first_step=2, last_step=3, text="straggler")
    figure = excess_map.draw(excess_over_peers(matrix([[9, 10], [10, 10], [10, 13]]), places(0, 0, 0)), marks=[mark])
    (shape,) = figure.layout.shapes
    assert (shape.x0, shape.x1, shape.y0, shape.y1) == (1.5, 3.5, 1.5, 2.5)
    assert figure.layout.annotations[0].text == "rank 2: straggler, steps 2 to 3"


def test_each_rank_has_its_own_mean_whatever_their_number() -> None:
    store = MemoryStore()
    store.add(
        "steps",
        [
            {"attempt": 0, "rank": rank, "step": step, "start_ns": 0, "duration_ns": 10**6 * (rank + step)}
            for rank in range(40)
            for step in range(1, 201)
        ],
    )  # fmt: skip
    found = rank_step(store, "step time", each_rank=True)
    assert found.values.shape == (40, 100)
    assert found.values[3, 0] == 3 + 1.5
    few = rank_step(store, "step time", each_rank=True, max_cells=50, max_rows=4_000)
    assert few.every_steps == 2
    assert few.values[3, 0] == 3 + 1


@pytest.mark.parametrize("ranks", [32, 256])
def test_the_texts_of_findings_cover_no_cell(ranks: int) -> None:
    """They stand above the map, one below the other, so that a narrow page shows where a slow stretch begins."""
    found, slow = simulated(ranks, 1.3)
    marks = [Mark(rank=rank, first_step=197, last_step=397, text="straggler") for rank in (slow % ranks, 1)]
    plain, figure = excess_map.draw(found), excess_map.draw(found, marks=marks)
    notes = [note for note in figure.layout.annotations if "straggler" in note.text]
    assert [note.text for note in notes] == [f"rank {mark.rank}: straggler, steps 197 to 397" for mark in marks]
    assert {(note.yref, note.y, note.yanchor) for note in notes} == {("paper", 1, "bottom")}
    assert notes[0].yshift >= notes[1].yshift + excess_map.TEXT_PX
    assert figure.layout.margin.t > notes[0].yshift + 12
    grown = figure.layout.height - figure.layout.margin.t
    assert grown >= plain.layout.height - plain.layout.margin.t, "the map keeps its height"


@pytest.mark.parametrize(("low", "top"), [(27.0, 120.0), (18.0, 142.0), (5.0, 9.0), (1.0, 4000.0), (19.0, 20.0)])
def test_the_labels_of_the_colour_bar_do_not_overlap(low: float, top: float) -> None:
    """The labels +100 and +120 were printed over each other."""
    found = excess_over_peers(matrix([[10.0] * 30] * 4), places(0, 0, 0, 0))
    bar = excess_map._colour_bar(found, low, top)
    assert len(bar["tickvals"]) == len(bar["ticktext"])
    assert np.diff(bar["tickvals"]).min() >= 0.1
    assert bar["ticktext"][-1] == f"+{float(f'{top:.2g}'):g}"
