"""A rank that stays slow is left out of the run, if `recovery.on_straggler` says so."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.launched import LaunchedRun, start
from tests.waiting import wait_for

DEADLINE_S = 200.0
SLOW = "slow_compute@step=15,rank=1,factor=40"
SETTINGS = (
    "parallel.dp_shard=-1", "train.steps=20000", "checkpoint.interval=0",
    "recovery.straggler_after_s=0.0", "recovery.straggler_speedup=1.05", "recovery.exclusion_cooldown_s=1.0",
)  # fmt: skip


def slow_run(tmp_path: Path, *, dry_run: bool = False) -> LaunchedRun:
    settings = [*SETTINGS, "recovery.on_straggler=exclude", "train.global_batch_size=6"]
    if dry_run:
        settings.append("recovery.exclusion_dry_run=true")
    return start(tmp_path, "elastic", faults=[SLOW], settings=settings, options=["--nproc-per-node", "3"])


def stopped(run: LaunchedRun) -> LaunchedRun:
    run.process.send_signal(signal.SIGTERM)
    return run.finish(exit_code=None)


def restarted(run: LaunchedRun) -> LaunchedRun:
    """The run, stopped once it has restarted and trained on."""
    wait_for(lambda: len(run.events("attempt_started")) > 1, "a restart", run, DEADLINE_S)
    wait_for(
        lambda: any(e["attempt"] == 1 for e in run.events("checkpoint", 0)), "a loaded checkpoint", run, DEADLINE_S
    )
    return stopped(run)


@pytest.mark.alone
def test_the_device_of_a_slow_rank_is_left_out(tmp_path: Path) -> None:
    run = restarted(slow_run(tmp_path))
    assert [event["world_size"] for event in run.events("attempt_started")] == [3, 2]
    (requested,) = run.events("exclusion_requested")
    assert (requested["ranks"], requested["mode"], requested["cause"]) == ([1], "exclude", "straggler")
    (excluded,) = run.events("excluded")
    assert (excluded["device"], excluded["excluded_rank"], excluded["cause"]) == ("slot 1", 1, "straggler")
    (saved,) = [e["checkpoint_step"] for e in run.events("preempted", 0) if e["attempt"] == 0]
    loaded = [e for e in run.events("checkpoint", 0) if e["attempt"] == 1 and e["state"] == "loaded"]
    assert [event["step"] for event in loaded] == [saved], "no step is lost"
    assert not run.events("rank_exit")
    (finding,) = run.findings("excluded")
    assert finding["evidence"]["excluded_for"] == "straggler"


@pytest.mark.alone
def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    run = slow_run(tmp_path, dry_run=True)
    wait_for(lambda: run.events("exclusion_withheld"), "the record of the dry run", run, DEADLINE_S)
    (withheld,) = run.events("exclusion_withheld")
    assert withheld["dry_run"] is True
    assert "slot 1" in withheld["reason"]
    run = stopped(run)
    assert len(run.events("attempt_started")) == 1
    assert not run.events("excluded")
