"""Every phase that a step records has a heatmap, and what communication costs is told call by call."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.figures.ranks.rank_step import MEASURES, rank_step
from tests.analyzers.memory_store import MemoryStore
from tests.dashboard.opened import open_page, shown
from tests.factories import make_run
from tests.waiting import wait_for

MS = 1_000_000


@pytest.mark.parametrize(("measure", "expected"), [("optimizer", 7.0), ("checkpoint", 40.0), ("evaluate", 25.0)])
def test_a_phase_has_its_own_heatmap(measure: str, expected: float) -> None:
    store = MemoryStore()
    store.add(
        "steps",
        [
            {"attempt": 0, "rank": rank, "step": 1, "start_ns": 0, "duration_ns": 100 * MS, "optimizer_ns": 9 * MS,
             "optimizer_wait_ns": 2 * MS, "checkpoint_ns": 40 * MS, "evaluate_ns": 25 * MS}
            for rank in range(2)
        ],
    )  # fmt: skip
    assert MEASURES[measure][1] == "ms"
    assert rank_step(store, measure).values.tolist() == [[expected], [expected]]


def test_the_page_of_ranks_offers_every_phase(tmp_path: Path) -> None:
    app = open_page(make_run(tmp_path, ranks=2, steps=12).path.parent, "ranks")
    for measure in ("optimizer", "checkpoint", "evaluate"):
        app.segmented_control(key="measure").set_value(measure).run()
        assert not app.exception
        assert f"No {measure} was recorded" not in shown(app)
    wait_for(lambda: "Slowest first" in shown(app) or app.run() is None, "the ranking", deadline_s=60)


def test_the_page_of_ranks_of_one_rank_asks_for_no_click_on_a_cell_that_is_not_there(tmp_path: Path) -> None:
    app = open_page(make_run(tmp_path, ranks=1, steps=12).path.parent, "ranks")
    text = wait_for(lambda: shown(app) if "In the mesh" in shown(app) else app.run() and "", "the mesh", deadline_s=60)
    assert "No rank has a peer" in text
    assert "There is only one rank." in text
    assert "Click a cell" not in text
    app.segmented_control(key="scale").set_value("as recorded").run()
    assert "Click a cell" in shown(app)


def test_calls_without_a_bandwidth_are_no_empty_chart(tmp_path: Path) -> None:
    app = open_page(make_run(tmp_path, ranks=1, steps=12).path.parent, "collectives")
    wait_for(lambda: "All calls as a table" in str(app) or app.run() is None, "the table", deadline_s=60)
    assert "No bandwidth was measured." in shown(app)


def test_the_page_of_collectives_tells_the_exposed_time_of_each_operation_size_and_group(tmp_path: Path) -> None:
    app = open_page(make_run(tmp_path, ranks=2, steps=12).path.parent, "collectives")
    wait_for(lambda: "Means over all ranks" in shown(app) or app.run() is None, "the table", deadline_s=60)
    assert not app.exception
    table = next(frame.value for frame in app.dataframe if "exposed (ms a step)" in frame.value.columns)
    assert table["operation"].tolist() == ["all_reduce"]
    assert table["calls a step"].tolist() == [2.0]
    assert table["exposed (ms a step)"].iloc[0] > 0
    assert 0 < table["exposed (% of in flight)"].iloc[0] <= 100


def test_the_page_of_ranks_of_a_run_without_steps_says_so(tmp_path: Path) -> None:
    app = open_page(make_run(tmp_path, ranks=2, steps=0).path.parent, "ranks")
    wait_for(lambda: "No step has ended." in shown(app) or app.run() is None, "the page", deadline_s=60)
    assert "No own work was recorded in this run." in shown(app)
    assert "could not be computed" not in shown(app)
