"""A slow rank is left out of the run or replaced, if `recovery.on_straggler` says so; so is a broken device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.e2e.broken_devices import DEADLINE_S, exporter, stopped, wait_for_attempt
from tests.e2e.launched import LaunchedRun, start
from tests.ports import free_port
from tests.waiting import wait_for

SLOW = "slow_compute@step=15,rank=1,factor=40"
SETTINGS = (
    "parallel.dp_shard=-1", "train.steps=20000", "checkpoint.interval=0",
    "recovery.straggler_after_s=0.0", "recovery.straggler_speedup=1.05", "recovery.exclusion_cooldown_s=1.0",
)  # fmt: skip


def slow_run(tmp_path: Path, *more: str, options: Sequence[str] = (), mode: str = "exclude") -> LaunchedRun:
    """Three ranks share the batch; further ones are spares."""
    settings = (*SETTINGS, f"recovery.on_straggler={mode}", "train.global_batch_size=6", *more)
    return start(tmp_path, "elastic", faults=[SLOW], settings=settings, options=["--nproc-per-node", "3", *options])


def test_the_device_of_a_slow_rank_is_excluded(tmp_path: Path) -> None:
    run = slow_run(tmp_path)
    wait_for_attempt(run, 1)
    run = stopped(run)
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


def test_a_slow_rank_is_replaced_and_a_broken_device_excluded(tmp_path: Path) -> None:
    uuid, nodes = "GPU-broken", ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}", "--node-rank"]
    with exporter(uuid) as gpus:
        run = slow_run(tmp_path, f"probes.dcgm_url={gpus.url}", mode="replace", options=[*nodes, "0"])
        spare = start(tmp_path, "elastic", options=[*nodes, "1", "--nproc-per-node", "1"])
        wait_for_attempt(run, 1)
        gpus.break_device_of(run, attempt=1, rank=1, uuid=uuid)
        wait_for_attempt(run, 2)
        run = stopped(run)
        spare.finish(exit_code=None)
    worlds = [(event["world_size"], event["ranks_left_over"]) for event in run.events("attempt_started")]
    assert worlds == [(3, 1), (3, 0), (2, 0)] * 2, "of both nodes"
    slow, broken = run.events("exclusion_requested")
    assert (slow["ranks"], slow["mode"], slow["cause"]) == ([1], "replace", "straggler")
    assert (broken["ranks"], broken["mode"], broken["cause"]) == ([1], "exclude", "xid")
    causes = [(e["excluded_rank"], e["cause"], e["attempt"]) for e in run.events("excluded")]
    assert causes == [(1, "straggler", 0), (1, "xid", 1)]
    assert not run.events("rank_exit"), "ranks save and leave: none dies"
    assert not run.findings("hang")


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    run = slow_run(tmp_path, "recovery.exclusion_dry_run=true")
    wait_for(lambda: run.events("exclusion_withheld"), "the record of the dry run", run, DEADLINE_S)
    (withheld,) = run.events("exclusion_withheld")
    assert withheld["dry_run"] is True
    assert "slot 1" in withheld["reason"]
    run = stopped(run)
    assert len(run.events("attempt_started")) == 1
    assert not run.events("excluded")
