"""Faults on DDP and FSDP: the right kind, the right rank, and the run goes on. Slow ranks: test_slow_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.depth import usually
from tests.e2e.launched import LaunchedRun, train

LAYOUTS = [*usually({"ddp": 0, "fsdp": 0}, later=["fsdp"])]
SPIKED = [*usually({"two": 0, "ddp": 0, "fsdp": 0}, later=["ddp", "fsdp"])]


@pytest.fixture(scope="module", params=LAYOUTS)
def broken_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LaunchedRun:
    """A NaN that is rolled back, then a hang and a death, each with a restart."""
    faults = ["nan_grad@step=12,rank=2", "hang@step=22,rank=1", "kill@step=32,rank=2"]
    return train(tmp_path_factory.mktemp("broken"), request.param, faults=faults, settings=["train.steps=40"])


def test_each_fault_of_a_run_is_one_finding(broken_run: LaunchedRun) -> None:
    findings = broken_run.own_findings()
    assert sorted(finding["kind"] for finding in findings) == ["hang", "non_finite", "rank_lost"], findings


def test_nan_gradient_is_named_refused_and_its_batch_trained_again(broken_run: LaunchedRun) -> None:
    (finding,) = broken_run.findings("non_finite")
    assert finding["ranks"] == [2]
    assert finding["first_step"] == 12
    assert "blocks." in finding["summary"]
    (rollback,) = broken_run.events("rollback", rank=0)
    assert rollback["from_step"] == 12
    assert rollback["to_step"] < 12
    assert rollback["replayed_batches"] == [11]
    assert not broken_run.events("batch_skipped", rank=0)
    assert "rank 2" in broken_run.output


def test_a_hung_rank_is_named_killed_and_the_run_resumes(broken_run: LaunchedRun) -> None:
    (hang,) = broken_run.findings("hang")
    assert hang["ranks"] == [1]
    assert set(hang["evidence"]["waiting_ranks"]) == {0, 2, 3}
    assert broken_run.events("stacks")
    assert [event["killed_rank"] for event in broken_run.events("culprit_killed")] == [1]
    assert broken_run.events("checkpoint", rank=0)
    assert "restart" in broken_run.output


def test_a_killed_rank_is_named_and_the_run_resumes(broken_run: LaunchedRun) -> None:
    (lost,) = broken_run.findings("rank_lost")
    assert lost["ranks"] == [2]
    assert "SIGKILL" in lost["summary"]
    loaded = [event["attempt"] for event in broken_run.events("checkpoint", rank=0) if event["state"] == "loaded"]
    assert loaded == [1, 2], "each attempt after the first starts from a checkpoint"


@pytest.mark.parametrize("layout", SPIKED)
def test_a_bad_batch_is_a_spike_and_is_skipped(tmp_path: Path, layout: str) -> None:
    run = train(tmp_path, layout, faults=["bad_batch@step=70"], settings=["train.steps=80", "optim.lr=3e-3"])
    (spike,) = run.own_findings()
    assert spike["kind"] == "loss_spike"
    assert 70 <= spike["first_step"] <= 72
    assert run.events("rollback", rank=0)
    assert run.events("batch_skipped", rank=0)


def test_a_rank_that_runs_out_of_memory_is_named_with_its_memory(tmp_path: Path) -> None:
    run = train(tmp_path, "two", faults=["oom@step=15,rank=1"], settings=["train.steps=18"])
    (lost,) = run.own_findings()
    assert (lost["kind"], lost["cause"], lost["ranks"]) == ("rank_lost", "out_of_memory", [1])
    assert lost["evidence"]["memory_last_bytes"] > 0
    assert lost["evidence"]["memory_of_peers_bytes"] > 0
