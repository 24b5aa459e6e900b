"""A scheduler wants the machine back (SIGTERM): the step is finished, a checkpoint saved, and `--resume` goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from store import Store
from tests.e2e.launched import LaunchedRun, kill, rankscope, resume, start, train
from tests.waiting import wait_for
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps

STEPS = 40
SHORT = ("checkpoint.interval=0", f"train.steps={STEPS}")


def _losses(run: LaunchedRun) -> dict[int, float]:
    """Loss of each step that was taken."""
    with Store.open(run.run) as store:
        return dict(store.rows("SELECT step, loss FROM steps WHERE rank = 0 AND committed ORDER BY attempt, start_ns"))


def _but_the_slow_data(run: LaunchedRun) -> list[dict[str, Any]]:
    """Findings but that of the fault put in: where the signal is late, rank 1 is slow for long enough to be named."""
    own = run.own_findings()
    return [f for f in own if f["kind"] != "data_bound" and (f["kind"], f["cause"]) != ("straggler", "data")]


def test_a_preempted_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = train(tmp_path / "whole", "two", settings=SHORT)
    # A slow rank gives the signal time to arrive; SIGTERM goes to one rank, as when one node is drained.
    cut = start(tmp_path / "cut", "two", settings=SHORT, faults=["slow_data@step=10,rank=1,seconds=1"])
    wait_for(lambda: cut.events("fault_injected", rank=1), "the slow rank", cut)
    kill(cut.pids()[1], signal.SIGTERM)
    cut.finish(exit_code=143)
    assert "The ranks finished their step and saved a checkpoint." in cut.output
    assert "rankscope train --resume" in cut.output
    assert [event["reason"] for event in cut.events("run_ended")] == ["preempted"]
    (stopped,) = cut.events("preempted", rank=0)
    assert checkpoint_steps(cut.run.checkpoints) == [stopped["checkpoint_step"]]
    assert 10 <= stopped["checkpoint_step"] < STEPS
    assert not cut.events("rank_exit")
    assert _but_the_slow_data(cut) == []
    verdict = rankscope("analyze", str(cut.run.path)).stdout
    assert "preempted" in verdict
    assert "--resume" in verdict

    again = resume(cut).finish()
    assert again.events("attempt_started")[-1]["attempt"] == 1
    assert _losses(again) == _losses(whole)
    assert _but_the_slow_data(again) == []
    assert again.analyze()["run"]["ended"] == "finished"


def test_a_rank_that_cannot_finish_its_step_leaves_without_a_checkpoint(tmp_path: Path) -> None:
    settings = (*SHORT, "recovery.grace_s=1", "recovery.hang_floor_s=100")
    run = start(tmp_path, "two", settings=settings, faults=["hang@step=8,rank=1"])
    wait_for(lambda: run.events("fault_injected", rank=1), "the hang", run)
    told_ns = time.time_ns()
    run.process.send_signal(signal.SIGTERM)
    run.finish(exit_code=143)
    (ended,) = run.events("run_ended")
    assert (ended["wall_ns"] - told_ns) / 1e9 < 60, "after the second of grace, and not at the limit of the hang"
    killed = [event["exit_rank"] for event in run.events("rank_stopped") if event["exit_code"] == -signal.SIGKILL]
    for rank in {0, 1} - {*killed}:  # on a crowded machine one may have had no time to record its end
        assert [event["checkpoint_step"] for event in run.events("preempted", rank)] == [None]
    assert "No checkpoint was saved at this stop" in run.output
    assert checkpoint_steps(run.run.checkpoints) == []


def test_a_rank_whose_peer_leaves_first_records_that_nothing_was_saved(tmp_path: Path) -> None:
    settings = (*SHORT, "recovery.grace_s=200", "recovery.hang_floor_s=100", "recovery.max_restarts=0")
    run = start(tmp_path, "two", settings=settings, faults=["hang@step=8,rank=1"])
    wait_for(lambda: run.events("fault_injected", rank=1), "the hang", run)
    kill(run.pids()[0], signal.SIGTERM)
    kill(run.pids()[1])
    run.finish(exit_code=None)
    assert [event["checkpoint_step"] for event in run.events("preempted", rank=0)] == [None]


def test_sigterm_before_the_first_step(tmp_path: Path) -> None:
    run = start(tmp_path, "two", settings=SHORT)
    wait_for(lambda: (run.runs_dir / "latest").exists() and run.events("run_started"), "the launch", run)
    run.process.send_signal(signal.SIGTERM)
    run.finish(exit_code=143)
    assert [event["reason"] for event in run.events("run_ended")] == ["preempted"]
    assert not run.events("rank_exit")
    resume(run, settings=["train.steps=5"]).finish()
