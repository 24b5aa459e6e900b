"""A rank that becomes slow is profiled beside a peer while the run goes on, and the report names both traces."""

from __future__ import annotations

import gzip
import signal
from pathlib import Path

import pytest

from tests.e2e.launched import rankscope, start
from tests.waiting import wait_for

NUM_STEPS = 2
SUSPECT = 1


@pytest.mark.timeout(300)
def test_a_slow_rank_and_a_peer_are_profiled(tmp_path: Path) -> None:
    run = start(
        tmp_path,
        "elastic",
        faults=[f"slow_compute@step=15,rank={SUSPECT},factor=10"],
        settings=[
            "train.steps=20000", "train.global_batch_size=6", "checkpoint.interval=0",
            "profiler.on_anomaly=true", f"profiler.anomaly_steps={NUM_STEPS}", "profiler.max_captures=1",
        ],
        options=["--nproc-per-node", "3"],
    )  # fmt: skip
    wait_for(lambda: run.events("profile_requested"), "a request", run, deadline_s=150.0)
    (request,) = run.events("profile_requested")
    suspect, peer = request["ranks"]
    assert (suspect, request["finding_kind"], request["num_steps"]) == (SUSPECT, "straggler", NUM_STEPS)
    wait_for(lambda: len(run.events("profile_summary")) == 2, "a summary of both traces", run)
    assert not run.has_ended()
    run.process.send_signal(signal.SIGTERM)
    run.finish(exit_code=None)

    captured = {rank: run.events("profile_captured", rank) for rank in range(3)}
    assert sorted(rank for rank, events in captured.items() if events) == sorted([suspect, peer])
    paths = {rank: captured[rank][0]["path"] for rank in (suspect, peer)}
    for rank, path in paths.items():
        (event,) = captured[rank]
        assert (event["request"], event["first_step"]) == (request["request"], request["first_step"])
        assert event["last_step"] == event["first_step"] + NUM_STEPS - 1
        trace = gzip.decompress((run.run.path / path).read_bytes()).decode()
        assert f"ProfilerStep#{event['first_step']}" in trace

    (straggler,) = run.findings("straggler")
    evidence = straggler["evidence"]
    assert (straggler["ranks"], straggler["cause"]) == ([SUSPECT], "compute")
    assert (evidence["profile_trace"], evidence["profile_trace_of_peer"]) == (paths[suspect], paths[peer])
    assert evidence["profile_peer_rank"] == peer
    assert any(name.startswith("aten::") for name in evidence["profile_operators"]), "the fault computes"
    printed = rankscope("analyze", str(run.run.path)).stdout
    assert all(path in printed for path in paths.values())
    assert f"a step against rank {peer}." in " ".join(printed.split())
