"""A device on which ranks keep dying is left out of the next attempt; the global batch stays."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.e2e.launched import train


def test_a_device_whose_rank_dies_repeatedly_is_excluded(tmp_path: Path) -> None:
    faults = ["kill@step=12,rank=1", "kill@step=22,rank=1"]
    settings = ["parallel.dp_shard=-1", "train.steps=30", "recovery.max_failures_per_device=2"]
    run = train(tmp_path, "elastic", faults=faults, settings=settings, options=["--nproc-per-node", "4"])
    assert [event["world_size"] for event in run.events("attempt_started")] == [4, 4, 2], (
        "three ranks cannot share a batch of 8"
    )
    (excluded,) = run.events("excluded")
    assert (excluded["device"], excluded["excluded_rank"], excluded["failures"]) == ("slot 1", 1, 2)
    assert signal.SIGKILL.name in excluded["reason"]
    assert run.analyze()["run"]["excluded"] == [
        {"device": "slot 1", "node_rank": 0, "attempt": 1, "reason": excluded["reason"]}
    ]
