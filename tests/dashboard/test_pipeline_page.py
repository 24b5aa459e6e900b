"""What the page Pipeline says of runs whose pipelines are known, and of each of their attempts."""

from __future__ import annotations

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import RunDir
from tests.analyzers.account.test_bubble import MS, gpipe
from tests.dashboard.opened import open_page, shown
from tests.factories import RankWriter, empty_run
from tests.waiting import wait_for

STAGES, MICROBATCHES = 4, 8


def pipelined(
    tmp_path: Path, *, attempts: dict[int, range], heavy: int = -1, loading_ms: int = 0, **of_step: int
) -> RunDir:
    """Perfect gpipe steps; stage `heavy` has twice the work, and the first one loads for `loading_ms` before it."""
    run = empty_run(tmp_path, config={"parallel": {"schedule": "gpipe"}}, world_size=STAGES)
    for attempt, numbers in attempts.items():
        writers = [
            RankWriter(run, rank=rank, attempt=attempt, ranks=STAGES, identity={"pp": rank}) for rank in range(STAGES)
        ]
        for step in numbers:
            start = (attempt * 1000 + step) * 1000 * MS
            spans = gpipe(STAGES, MICROBATCHES, slow=heavy, factor=2, step=step, start=start)
            for rank, _, stage, microbatch, kind, begin, end in spans:
                row = {"step": step, "stage": stage, "microbatch": microbatch, "kind": kind, "start_ns": begin}
                writers[rank].append("spans", COMPLETE, **row, end_ns=end)
            for rank, writer in enumerate(writers):
                own = {"data_ns": loading_ms * MS if rank == 0 else 0, "data_wait_ns": 0, **of_step}
                writer.append("steps", COMPLETE, step=step, start_ns=start, duration_ns=900 * MS, committed=1, **own)
        for writer in writers:
            writer.close()
    return run


def text_of(app: AppTest, *words: str) -> str:
    """The page's text once all `words` stand on it: what takes long comes at a later look."""

    def missing() -> list[str]:
        assert not app.exception, [error.value for error in app.exception]
        return [word for word in words if word not in shown(app)]

    wait_for(lambda: not missing() or (app.run() and False), f"{missing()}", deadline_s=60)
    return shown(app)


def test_the_bubble_is_the_formula_of_a_perfect_pipeline(tmp_path: Path) -> None:
    run = pipelined(tmp_path, attempts={0: range(1, 21)})
    text = text_of(open_page(run.path.parent, "pipeline", run=run.run_id), "Bubble by rank", "Step 20 as it ran")
    for words in (
        "Schedule: gpipe", "Bubble: 27.3 %", "Ideal: 27.3 %",
        "Imbalance: 0 %", "Communication: 0 %", "Data: 0 %", "Bubble by step",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert "No span of a stage" not in text


def test_what_makes_the_bubble_larger_is_split(tmp_path: Path) -> None:
    run = pipelined(tmp_path, attempts={0: range(1, 21)}, heavy=2, loading_ms=11)
    app = open_page(run.path.parent, "pipeline", run=run.run_id)
    text = text_of(app, "Imbalance", "Stage 2 has the most work")
    numbers = {metric.label: metric.value for metric in app.metric}
    parts = [float(numbers[name].removesuffix(" %")) for name in (
        "Ideal", "Imbalance", "Communication", "Data")]  # fmt: skip
    assert sum(parts) == pytest.approx(float(numbers["Bubble"].removesuffix(" %")), abs=0.2)
    assert parts[1] > 5
    assert parts[3] > 5
    assert "38 % of it" in text


def test_an_earlier_attempt_can_be_chosen(tmp_path: Path) -> None:
    run = pipelined(tmp_path, attempts={0: range(1, 31), 1: range(21, 41)})
    app = open_page(run.path.parent, "pipeline", run=run.run_id)
    text_of(app, "Step 40 as it ran")
    (attempt,) = [box for box in app.selectbox if box.label == "Attempt"]
    assert (attempt.value, attempt.options) == (1, ["1", "0"])
    app.number_input[0].set_value(5).run()
    assert "No span of a stage was recorded in step 5 of attempt 1" in text_of(app, "Step 5 as it ran")
    attempt.select(0).run()
    assert "No span" not in text_of(app, "Step 30 as it ran"), "the newest of that attempt"
    app.number_input[0].set_value(5).run()
    assert "No span" not in text_of(app, "Step 5 as it ran")


def test_with_one_attempt_there_is_nothing_to_choose(tmp_path: Path) -> None:
    run = pipelined(tmp_path, attempts={0: range(1, 21)})
    app = open_page(run.path.parent, "pipeline", run=run.run_id)
    text_of(app, "Step 20 as it ran")
    assert not app.selectbox or "Attempt" not in [box.label for box in app.selectbox]


def test_a_bubble_that_was_not_measured_is_not_left_out_silently(tmp_path: Path) -> None:
    run = pipelined(tmp_path, attempts={0: range(1, 21)}, stamped_steps=1)
    text = text_of(open_page(run.path.parent, "pipeline", run=run.run_id), "Step 20 as the hosts issued it")
    assert "The pipeline bubble was not measured: spans are those of the host" in text
    assert "Bubble:" not in text
