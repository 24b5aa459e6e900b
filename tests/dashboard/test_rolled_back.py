"""A run that goes over steps again: every page says so, and numbers and calls are those of what runs now."""

from __future__ import annotations

from pathlib import Path

from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import RunDir
from tests.dashboard.opened import open_page, shown
from tests.factories import RankWriter, empty_run, make_run
from tests.waiting import wait_for

STEP_NS = 100_000_000


def rolled_back(tmp_path: Path) -> RunDir:
    """Steps 1 to 20, back to 10, then 11 to 13: a second ago."""
    run = empty_run(tmp_path, world_size=1)
    writer = RankWriter(run, rank=0)
    writer.now_ns -= 24 * STEP_NS
    losses = dict.fromkeys(range(1, 21), 5.0)
    for step in [*losses, *range(11, 14)]:
        loss = losses.pop(step, 1.25)
        writer.append(
            "steps", COMPLETE, step=step, start_ns=writer.now_ns, duration_ns=STEP_NS, loss=loss, tokens=64,
            data_ns=0, forward_ns=STEP_NS // 2, backward_ns=STEP_NS // 2,
        )  # fmt: skip
        writer.now_ns += STEP_NS
        if step == 20:
            writer.event("batch_skipped", batch_index=19, reason="x")
            writer.event("rollback", from_step=20, to_step=10, tier="memory", reason="x", skipped_batches=[19])
    return run


def test_the_head_says_which_steps_are_gone_over_again_and_the_tiles_show_them(tmp_path: Path) -> None:
    app = open_page(rolled_back(tmp_path).path.parent)
    assert not app.exception
    text = shown(app)
    assert "rolled back, repeating steps 11 to 20: x" in text.replace("\\:", ":")
    assert "Step: 13" in text
    assert "Loss: 1.2500" in text
    assert "Tokens/s: 640" in text


def test_the_recovery_page_lists_skipped_batches(tmp_path: Path) -> None:
    app = open_page(rolled_back(tmp_path).path.parent, "recovery")
    wait_for(lambda: "Skipped batches" in shown(app) or app.run() is None, "the skipped batches", deadline_s=60)
    assert not app.exception


def test_what_was_in_flight_when_a_former_attempt_ended_is_not_in_flight_now(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=20, hang={1: 12}, end="")
    make_run(tmp_path, run=run, attempt=1, ranks=2, steps=400, step_ms=1.0, first_step=5, end="")
    app = open_page(run.path.parent, "timeline")
    app.selectbox(key="timeline-attempt").set_value(0).run()
    wait_for(lambda: "In flight" in shown(app) or app.run() is None, "the calls", deadline_s=60)
    assert not app.exception
    assert "In flight when the records end" in shown(app)
